// The TypeScript SDK 2.x as a server of the protocol 2026-07-28, and of no older one.

import http from 'node:http';

import { toNodeHandler } from '@modelcontextprotocol/node';
import { createMcpHandler, InMemoryServerEventBus, McpServer } from '@modelcontextprotocol/server';
import * as z from 'zod/v4';

import { count } from './tools.mjs';

const bus = new InMemoryServerEventBus();
const begin = () => createMcpHandler(create, { legacy: 'reject', bus });
const calls = begin();
// Its own: to close it ends its streams in good order, and would break off calls.
let streams = begin();

function create() {
    const capabilities = { resources: { subscribe: true } };
    const server = new McpServer({ name: 'interop-modern', version: '1' }, { capabilities });
    const counted = z.object({ to: z.number(), interval_ms: z.number().default(0) });
    server.registerTool('count', { inputSchema: counted }, (given, context) =>
        count(given, {
            report: (progress, total) => {
                const progressToken = context.mcpReq._meta.progressToken;
                const params = { progressToken, progress, total };
                return context.mcpReq.notify({ method: 'notifications/progress', params });
            },
        })
    );
    const changed = z.object({ number: z.number() });
    server.registerTool('change', { inputSchema: changed }, ({ number }) => {
        bus.publish({ kind: 'resource_updated', uri: `count://${number}` });
        return { content: [{ type: 'text', text: `changed ${number}` }] };
    });
    server.registerTool('end_listening', {}, async () => {
        const ending = streams;
        streams = begin();
        await ending.close();
        return { content: [{ type: 'text', text: 'ended' }] };
    });
    return server;
}

const server = http.createServer((request, response) => {
    const listens = request.headers['mcp-method'] === 'subscriptions/listen';
    return toNodeHandler(listens ? streams : calls)(request, response);
});
server.listen(0, '127.0.0.1', () => console.log(`listening on 127.0.0.1:${server.address().port}`));
