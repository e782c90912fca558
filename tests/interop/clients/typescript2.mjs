// The TypeScript SDK 2.x.

import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client';

import { run } from './calls.mjs';

const client = new Client({ name: 'interop-typescript2', version: '1' });
await run(client, {
    Transport: StreamableHTTPClientTransport,
    tool: (params, options) => client.callTool(params, options),
});
