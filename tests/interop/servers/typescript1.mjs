// The TypeScript SDK 1.x with its own example event store: one for each session, as in its example
// `simpleStreamableHttp`, or with `--one-store` one for all, as in `ssePollingExample`.

import { InMemoryEventStore } from '@modelcontextprotocol/sdk/examples/shared/inMemoryEventStore.js';
import { McpServer } from '@modelcontextprotocol/sdk/server/mcp.js';
import { StreamableHTTPServerTransport } from '@modelcontextprotocol/sdk/server/streamableHttp.js';
import * as z from 'zod/v4';

import { announce, count, listen } from './tools.mjs';

const info = { name: 'interop-typescript1', version: '1' };

async function begin(options) {
    const server = new McpServer(info, { capabilities: { logging: {} } });
    const counted = {
        to: z.number(),
        interval_ms: z.number().default(0),
        close_after: z.number().default(0),
    };
    server.registerTool('count', { inputSchema: counted }, (given, extra) =>
        count(given, {
            report: (progress, total) => {
                const params = { progressToken: extra._meta.progressToken, progress, total };
                return extra.sendNotification({ method: 'notifications/progress', params });
            },
            close: extra.closeSSEStream,
        })
    );
    const announced = { text: z.string(), times: z.number(), interval_ms: z.number().default(0) };
    server.registerTool('announce', { inputSchema: announced }, given =>
        announce(given, { log: data => server.server.sendLoggingMessage({ level: 'info', data }) })
    );
    const transport = new StreamableHTTPServerTransport(options);
    await server.connect(transport);
    return transport;
}

listen(begin, () => new InMemoryEventStore());
