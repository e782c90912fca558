// What the TypeScript clients have in common. Each line that comes on stdin is a tool call,
// `{"name": …, "arguments": …}`; they make one after the other, and end when stdin does. What they
// get goes to stdout, a JSON object a line: a step of a call, a note (a log message, which comes on
// the listening stream), how a call ended; and what the SDK tells its `onerror`.

import { createInterface } from 'node:readline';

export const print = value => console.log(JSON.stringify(value));

export async function run(client, { Transport, tool }) {
    client.onerror = error => print({ onerror: error.message });
    client.fallbackNotificationHandler = async ({ method, params }) => {
        if (method === 'notifications/message') {
            print({ note: params.data });
        }
    };
    await client.connect(new Transport(new URL(process.argv[2])));
    for await (const line of createInterface({ input: process.stdin })) {
        print(await made(tool, JSON.parse(line)));
    }
    process.exit();
}

async function made(tool, call) {
    const options = { onprogress: ({ progress, total }) => print({ step: progress, of: total }) };
    try {
        const result = await tool(call, options);
        return { result: result.content[0].text };
    } catch (error) {
        const { code = null, message, data } = error;
        return { error: { code: data?.status ?? code, message, reason: data?.reason } };
    }
}
