// What the two TypeScript servers have in common: the tools' work, and the sessions.

import { randomUUID } from 'node:crypto';
import http from 'node:http';

// Without milliseconds it doesn't even let others run: all that follows is of one moment.
const pause = async ms => {
    if (ms) {
        await new Promise(resolve => setTimeout(resolve, ms));
    }
};

/**
 * Counts, and reports each number as progress on the call's own stream. After the number
 * `close_after` the server closes the connection, and the client is to poll.
 */
export async function count({ to, interval_ms, close_after }, { report, close }) {
    for (let step = 1; step <= to; step++) {
        await pause(interval_ms);
        await report(step, to);
        if (step === close_after) {
            close?.();
        }
    }
    await pause(interval_ms);
    return { content: [{ type: 'text', text: `counted to ${to}` }] };
}

/** Sends log messages, which go out on the session's standalone stream. */
export async function announce({ text, times, interval_ms }, { log }) {
    for (let time = 1; time <= times; time++) {
        await pause(interval_ms);
        await log(`${text} ${time}`);
    }
    return { content: [{ type: 'text', text: `announced ${times} times` }] };
}

/**
 * Listens, with a server and a transport per session. `begin(options)` gives a connected transport;
 * the options say how a session begins.
 */
export function listen(begin, newStore) {
    const transports = new Map();
    const shared = process.argv.includes('--one-store') ? newStore() : undefined;
    const server = http.createServer(async (request, response) => {
        let transport = transports.get(request.headers['mcp-session-id']);
        if (!transport && request.headers['mcp-session-id']) {
            const error = { code: -32001, message: 'Session not found' };
            response.writeHead(404, { 'content-type': 'application/json' });
            response.end(JSON.stringify({ jsonrpc: '2.0', id: null, error }));
            return;
        }
        transport ??= await begin({
            sessionIdGenerator: () => randomUUID(),
            eventStore: shared ?? newStore(),
            onsessioninitialized: id => transports.set(id, transport),
            onsessionclosed: id => transports.delete(id),
        });
        await transport.handleRequest(request, response);
    });
    server.listen(0, '127.0.0.1', () => console.log(`listening on 127.0.0.1:${server.address().port}`));
}
