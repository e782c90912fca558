// The TypeScript SDK 1.x as the server that the conformance suite's scenarios ask for (the suite has
// one only in its sources): each tool, resource and prompt does what its scenario says.

import { InMemoryEventStore } from '@modelcontextprotocol/sdk/examples/shared/inMemoryEventStore.js';
import { Server } from '@modelcontextprotocol/sdk/server/index.js';
import { StreamableHTTPServerTransport } from '@modelcontextprotocol/sdk/server/streamableHttp.js';
import * as types from '@modelcontextprotocol/sdk/types.js';

import { listen } from './tools.mjs';

const RETRY_MS = 500;
const PNG =
    'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==';
const WAV = 'UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA=';

const pause = () => new Promise(resolve => setTimeout(resolve, 50));
const text = words => ({ type: 'text', text: words });
const image = { type: 'image', data: PNG, mimeType: 'image/png' };
const embedded = (uri, mimeType, words) => ({
    type: 'resource',
    resource: { uri, mimeType, text: words },
});
const strings = (...names) => Object.fromEntries(names.map(name => [name, { type: 'string' }]));
const titled = (word, ...titles) => titles.map((title, at) => ({ const: `${word}${at + 1}`, title }));

const OPTIONS = ['option1', 'option2', 'option3'];
const DEFAULTS = {
    name: { type: 'string', default: 'John Doe' },
    age: { type: 'integer', default: 30 },
    score: { type: 'number', default: 95.5 },
    status: { type: 'string', enum: ['active', 'inactive', 'pending'], default: 'active' },
    verified: { type: 'boolean', default: true },
};
const ENUMS = {
    untitledSingle: { type: 'string', enum: OPTIONS },
    titledSingle: { type: 'string', oneOf: titled('value', 'First Option', 'Second Option', 'Third Option') },
    legacyEnum: {
        type: 'string',
        enum: ['opt1', 'opt2', 'opt3'],
        enumNames: ['Option One', 'Option Two', 'Option Three'],
    },
    untitledMulti: { type: 'array', items: { type: 'string', enum: OPTIONS } },
    titledMulti: {
        type: 'array',
        items: { anyOf: titled('value', 'First Choice', 'Second Choice', 'Third Choice') },
    },
};
const SCHEMA_2020_12 = {
    $schema: 'https://json-schema.org/draft/2020-12/schema',
    type: 'object',
    $defs: { address: { type: 'object', properties: strings('street', 'city') } },
    properties: { name: { type: 'string' }, address: { $ref: '#/$defs/address' } },
    additionalProperties: false,
};

/** Asks the client's user, and says what came. */
function elicit(properties, required, told = 'Elicitation completed: ') {
    return async (given, { sendRequest }) => {
        const requestedSchema = { type: 'object', properties, required };
        const params = { message: given.message ?? 'Please answer', requestedSchema };
        const { action, content } = await sendRequest(
            { method: 'elicitation/create', params },
            types.ElicitResultSchema
        );
        return [text(`${told}action=${action}, content=${JSON.stringify(content ?? {})}`)];
    };
}

async function sample({ prompt }, { sendRequest }) {
    const messages = [{ role: 'user', content: text(prompt) }];
    const { content } = await sendRequest(
        { method: 'sampling/createMessage', params: { messages, maxTokens: 100 } },
        types.CreateMessageResultSchema
    );
    return [text(`LLM response: ${content.text}`)];
}

async function log(_, { sendNotification }) {
    for (const data of ['Tool execution started', 'Tool processing data', 'Tool execution completed']) {
        await sendNotification({ method: 'notifications/message', params: { level: 'info', data } });
        await pause();
    }
    return [text('logged')];
}

async function report(_, { sendNotification, _meta }) {
    for (const progress of [0, 50, 100]) {
        const params = { progressToken: _meta?.progressToken, progress, total: 100 };
        if (params.progressToken !== undefined) {
            await sendNotification({ method: 'notifications/progress', params });
        }
        await pause();
    }
    return [text('reported')];
}

async function reconnect(_, { closeSSEStream }) {
    closeSSEStream?.();
    await pause();
    return [text('reconnected')];
}

function fail() {
    throw new Error('This tool intentionally returns an error for testing');
}

/** Each tool's content or what makes it, and its arguments, all of them text; or its schema. */
const TOOLS = {
    test_simple_text: [[text('This is a simple text response for testing.')]],
    test_image_content: [[image]],
    test_audio_content: [[{ type: 'audio', data: WAV, mimeType: 'audio/wav' }]],
    test_embedded_resource: [
        [embedded('test://embedded-resource', 'text/plain', 'This is an embedded resource content.')],
    ],
    test_multiple_content_types: [
        [
            text('Multiple content types test:'),
            image,
            embedded('test://mixed-content-resource', 'application/json', '{"test":"data","value":123}'),
        ],
    ],
    test_tool_with_logging: [log],
    test_tool_with_progress: [report],
    test_error_handling: [fail],
    test_reconnection: [reconnect],
    test_sampling: [sample, ['prompt']],
    test_elicitation: [
        elicit(strings('username', 'email'), ['username', 'email'], 'User response: '),
        ['message'],
    ],
    test_elicitation_sep1034_defaults: [elicit(DEFAULTS, [])],
    test_elicitation_sep1330_enums: [elicit(ENUMS, [])],
    json_schema_2020_12_tool: [[text('as asked')], SCHEMA_2020_12],
};

const READABLE = {
    'test://static-text': { mimeType: 'text/plain', text: 'This is the content of the static text resource.' },
    'test://static-binary': { mimeType: 'image/png', blob: PNG },
    'test://watched-resource': { mimeType: 'text/plain', text: 'Watched.' },
};
const TEMPLATE = 'test://template/{id}/data';

const PROMPTS = {
    test_simple_prompt: [[], () => [text('This is a simple prompt for testing.')]],
    test_prompt_with_arguments: [
        ['arg1', 'arg2'],
        ({ arg1, arg2 }) => [text(`Prompt with arguments: arg1='${arg1}', arg2='${arg2}'`)],
    ],
    test_prompt_with_embedded_resource: [
        ['resourceUri'],
        ({ resourceUri }) => [
            embedded(resourceUri, 'text/plain', 'Embedded resource content for testing.'),
            text('Please process the embedded resource above.'),
        ],
    ],
    test_prompt_with_image: [[], () => [image, text('Please analyze the image above.')]],
};

const described = name => ({ name, description: name.replaceAll('_', ' ') });

function inputSchema(asked = []) {
    return Array.isArray(asked) ? { type: 'object', properties: strings(...asked), required: asked } : asked;
}

async function call({ params: { name, arguments: given = {} } }, extra) {
    const [made] = TOOLS[name];
    try {
        return { content: typeof made === 'function' ? await made(given, extra) : made };
    } catch (error) {
        return { content: [text(error.message)], isError: true };
    }
}

function read({ params: { uri } }) {
    const id = /^test:\/\/template\/(.*)\/data$/.exec(uri)?.[1];
    const made = { id, templateTest: true, data: `Data for ID: ${id}` };
    const found = READABLE[uri] ?? { mimeType: 'application/json', text: JSON.stringify(made) };
    return { contents: [{ uri, ...found }] };
}

function prompt({ params: { name, arguments: given = {} } }) {
    return { messages: PROMPTS[name][1](given).map(content => ({ role: 'user', content })) };
}

const HANDLERS = [
    [
        types.ListToolsRequestSchema,
        () => ({
            tools: Object.entries(TOOLS).map(([name, [, asked]]) => ({
                ...described(name),
                inputSchema: inputSchema(asked),
            })),
        }),
    ],
    [types.CallToolRequestSchema, call],
    [
        types.ListResourcesRequestSchema,
        () => ({
            resources: Object.entries(READABLE).map(([uri, { mimeType }]) => ({
                uri,
                mimeType,
                ...described(uri),
            })),
        }),
    ],
    [
        types.ListResourceTemplatesRequestSchema,
        () => ({ resourceTemplates: [{ uriTemplate: TEMPLATE, ...described(TEMPLATE) }] }),
    ],
    [types.ReadResourceRequestSchema, read],
    [types.SubscribeRequestSchema, () => ({})],
    [types.UnsubscribeRequestSchema, () => ({})],
    [
        types.ListPromptsRequestSchema,
        () => ({
            prompts: Object.entries(PROMPTS).map(([name, [asked]]) => ({
                ...described(name),
                arguments: asked.map(each => ({ ...described(each), required: true })),
            })),
        }),
    ],
    [types.GetPromptRequestSchema, prompt],
    [types.CompleteRequestSchema, () => ({ completion: { values: ['paris', 'park'], total: 2 } })],
    [types.SetLevelRequestSchema, () => ({})],
];

/**
 * Answers requests only that were meant for this machine, at whatever port. The suite polls in the
 * name of 2025-03-26, where the SDK wouldn't begin a stream with an id to resume from; here it does.
 */
class LocalTransport extends StreamableHTTPServerTransport {
    async handleRequest(request, response, body) {
        const version = request.rawHeaders.findIndex(name => /^mcp-protocol-version$/i.test(name));
        if (version >= 0) {
            request.rawHeaders[version + 1] = types.LATEST_PROTOCOL_VERSION;
        }
        const { host, origin } = request.headers;
        const names = [`http://${host}`, ...(origin ? [origin] : [])];
        if (names.every(name => ['localhost', '127.0.0.1'].includes(new URL(name).hostname))) {
            await super.handleRequest(request, response, body);
        } else {
            response.writeHead(403).end();
        }
    }
}

async function begin(options) {
    const capabilities = {
        completions: {},
        logging: {},
        prompts: {},
        resources: { subscribe: true },
        tools: {},
    };
    const server = new Server({ name: 'interop-conformance', version: '1' }, { capabilities });
    for (const [schema, handler] of HANDLERS) {
        server.setRequestHandler(schema, handler);
    }
    const transport = new LocalTransport({ ...options, retryInterval: RETRY_MS });
    await server.connect(transport);
    return transport;
}

listen(begin, () => new InMemoryEventStore());
