// The TypeScript SDK 2.x, with an event store of the shape that its examples have: one for each
// session, or with `--one-store` one for all.

import { NodeStreamableHTTPServerTransport } from '@modelcontextprotocol/node';
import { McpServer } from '@modelcontextprotocol/server';
import * as z from 'zod/v4';

import { announce, count, listen } from './tools.mjs';

const info = { name: 'interop-typescript2', version: '1' };

/** Keeps everything in the order in which it was stored, and knows nothing of sessions. */
class ExampleEventStore {
    events = new Map();

    async storeEvent(streamId, message) {
        const id = `${streamId}_${Date.now()}_${Math.random().toString(36).slice(2, 10)}`;
        this.events.set(id, { streamId, message });
        return id;
    }

    async replayEventsAfter(cursor, { send }) {
        const streamId = this.events.get(cursor)?.streamId ?? '';
        let missed = false;
        for (const [id, event] of this.events) {
            if (missed && event.streamId === streamId) {
                await send(id, event.message);
            }
            missed ||= id === cursor;
        }
        return streamId;
    }
}

async function begin(options) {
    const server = new McpServer(info, { capabilities: { logging: {} } });
    const counted = z.object({
        to: z.number(),
        interval_ms: z.number().default(0),
        close_after: z.number().default(0),
    });
    server.registerTool('count', { inputSchema: counted }, (given, context) =>
        count(given, {
            report: (progress, total) => {
                const progressToken = context.mcpReq._meta.progressToken;
                const params = { progressToken, progress, total };
                return context.mcpReq.notify({ method: 'notifications/progress', params });
            },
            close: context.http?.closeSSE,
        })
    );
    const announced = z.object({
        text: z.string(),
        times: z.number(),
        interval_ms: z.number().default(0),
    });
    server.registerTool('announce', { inputSchema: announced }, given =>
        announce(given, { log: data => server.server.sendLoggingMessage({ level: 'info', data }) })
    );
    const transport = new NodeStreamableHTTPServerTransport(options);
    await server.connect(transport);
    return transport;
}

listen(begin, () => new ExampleEventStore());
