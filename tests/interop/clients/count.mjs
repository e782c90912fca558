// What the two TypeScript clients have in common: they call the tool `count` with the arguments
// that they are given as JSON, and then once more, shortly, to see whether the session still works. What they get goes to stdout, a JSON object a line: a step, how the call ended, how
// the next one did; and what the SDK tells its `onerror`. They end when stdin does.

export const print = value => console.log(JSON.stringify(value));

export async function run(client, call) {
    client.onerror = error => print({ noted: error.message });
    const [, , url, given] = process.argv;
    await client.connect(new call.Transport(new URL(url)));
    print(await count(call, JSON.parse(given)));
    print({ next: await count(call, { to: 1 }) });
    process.stdin.on('end', () => process.exit()).resume();
}

async function count(call, given) {
    const options = { onprogress: ({ progress, total }) => print({ step: progress, of: total }) };
    try {
        const result = await call.tool({ name: 'count', arguments: given }, options);
        return { result: result.content[0].text };
    } catch (error) {
        const { code = null, message, data } = error;
        return { error: { code: data?.status ?? code, message, reason: data?.reason } };
    }
}
