// The TypeScript SDK 1.x.

import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';

import { run } from './calls.mjs';

const client = new Client({ name: 'interop-typescript1', version: '1' });
await run(client, {
    Transport: StreamableHTTPClientTransport,
    tool: (params, options) => client.callTool(params, undefined, options),
});
