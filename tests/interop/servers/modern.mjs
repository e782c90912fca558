// The TypeScript SDK 2.x as a server of the protocol 2026-07-28, and of no older one.

import http from 'node:http';

import { toNodeHandler } from '@modelcontextprotocol/node';
import { createMcpHandler, McpServer } from '@modelcontextprotocol/server';
import * as z from 'zod/v4';

import { count } from './tools.mjs';

function create() {
    const server = new McpServer({ name: 'interop-modern', version: '1' });
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
    return server;
}

const server = http.createServer(toNodeHandler(createMcpHandler(create, { legacy: 'reject' })));
server.listen(0, '127.0.0.1', () => console.log(`listening on 127.0.0.1:${server.address().port}`));
