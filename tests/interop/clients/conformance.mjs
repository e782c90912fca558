// The TypeScript SDK 1.x as the client that the conformance suite's scenarios ask for. The suite
// names the scenario in the environment and the server in the arguments.

import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import { ElicitRequestSchema } from '@modelcontextprotocol/sdk/types.js';

const CALLS = {
    tools_call: { name: 'add_numbers', arguments: { a: 5, b: 3 } },
    'elicitation-sep1034-client-defaults': { name: 'test_client_elicitation_defaults', arguments: {} },
    'sse-retry': { name: 'test_reconnection', arguments: {} },
};

const capabilities = { elicitation: { form: { applyDefaults: true } } };
const client = new Client({ name: 'interop-conformance', version: '1' }, { capabilities });
client.setRequestHandler(ElicitRequestSchema, () => ({ action: 'accept', content: {} }));
const transport = new StreamableHTTPClientTransport(new URL(process.argv[2]));
await client.connect(transport);
await client.listTools();
const call = CALLS[process.env.MCP_CONFORMANCE_SCENARIO];
if (call) {
    await client.callTool(call);
}
await transport.close();
