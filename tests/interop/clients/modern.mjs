// The TypeScript SDK 2.x as a client of the protocol 2026-07-28, and of no older one. Given
// `listen` after the URL, it makes no calls from stdin, but listens to two resources twice: it has
// the server change the first one, and the second one when it has heard of that, and then the
// server ends the stream, the second time the client. What it heard and who ended goes to stdout,
// as JSON.

import { EventEmitter, once } from 'node:events';
import { setTimeout } from 'node:timers/promises';

import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client';

import { print, run } from './calls.mjs';

// How long it waits for a change, or for the end, of which it knows that the server has sent it.
const PATIENCE_MS = 5000;

const versionNegotiation = { mode: { pin: '2026-07-28' } };
const client = new Client({ name: 'interop-modern', version: '1' }, { versionNegotiation });

async function listen(ends) {
    const updates = new EventEmitter();
    client.setNotificationHandler('notifications/resources/updated', ({ params }) => {
        updates.emit('update', params.uri);
    });
    const subscription = await client.listen({ resourceSubscriptions: ['count://1', 'count://2'] });
    for (const number of [1, 2]) {
        const update = once(updates, 'update', { signal: AbortSignal.timeout(PATIENCE_MS) });
        await client.callTool({ name: 'change', arguments: { number } });
        const [uri] = await update;
        print({ heard: uri });
    }
    if (ends === 'server') {
        await client.callTool({ name: 'end_listening', arguments: {} });
    } else {
        await subscription.close();
    }
    const how = await Promise.race([subscription.closed, setTimeout(PATIENCE_MS, 'never')]);
    print({ ended: { graceful: 'by the server', local: 'by the client' }[how] ?? how });
}

const [, , url, what] = process.argv;
if (what === 'listen') {
    await client.connect(new StreamableHTTPClientTransport(new URL(url)));
    for (const ends of ['server', 'client']) {
        await listen(ends);
    }
    process.exit();
}
await run(client, {
    Transport: StreamableHTTPClientTransport,
    tool: (params, options) => client.callTool(params, options),
});
