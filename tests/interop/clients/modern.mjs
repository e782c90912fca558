// The TypeScript SDK 2.x as a client of the protocol 2026-07-28, and of no older one.

import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client';

import { run } from './calls.mjs';

const versionNegotiation = { mode: { pin: '2026-07-28' } };
const client = new Client({ name: 'interop-modern', version: '1' }, { versionNegotiation });
await run(client, {
    Transport: StreamableHTTPClientTransport,
    tool: (params, options) => client.callTool(params, options),
});
