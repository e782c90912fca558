// Reads Kubernetes resources (a JSON list) from standard input, and writes for each the list of what
// is wrong with it.
//
// The packages @kubernetes-models/* are made from the kinds' own definitions: Istio's CRDs, the Go
// types of Envoy Gateway and of the Gateway API. Their types refuse what isn't declared, which the
// definitions themselves don't (a cluster drops it in silence), so a resource is checked as an object
// literal of TypeScript; their validators know formats, patterns and bounds.

import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import ts from "typescript";

const PACKAGES = [
  [/^gateway\.envoyproxy\.io$/, "@kubernetes-models/envoy-gateway"],
  [/^gateway\.networking\.k8s\.io$/, "@kubernetes-models/gateway-api"],
  [/\.istio\.io$/, "@kubernetes-models/istio"],
];

function moduleOf({ apiVersion, kind }) {
  const [group] = apiVersion.split("/");
  const found = PACKAGES.find(([pattern]) => pattern.test(group));
  if (!found) throw new Error(`no package has ${apiVersion}`);
  return `${found[1]}/${apiVersion}/${kind}`;
}

const resources = JSON.parse(readFileSync(0, "utf8"));
const sources = new Map(
  resources.map((resource, index) => [
    resolve(`resource-${index}.ts`),
    `import type { I${resource.kind} } from ${JSON.stringify(moduleOf(resource))};\n` +
      `export const resource: I${resource.kind} = ${JSON.stringify(resource)};\n`,
  ]),
);

const options = {
  module: ts.ModuleKind.NodeNext,
  moduleResolution: ts.ModuleResolutionKind.NodeNext,
  target: ts.ScriptTarget.ES2022,
  strict: true,
  noEmit: true,
  skipLibCheck: true,
  types: [],
};
const host = ts.createCompilerHost(options);
const { fileExists, readFile } = host;
host.fileExists = (name) => sources.has(name) || fileExists(name);
host.readFile = (name) => sources.get(name) ?? readFile(name);
const program = ts.createProgram([...sources.keys()], options, host);
const broken = [...program.getOptionsDiagnostics(), ...program.getGlobalDiagnostics()];
if (broken.length) throw new Error(ts.formatDiagnostics(broken, host));

const wrong = [];
for (const [index, name] of [...sources.keys()].entries()) {
  const source = program.getSourceFile(name);
  const found = [...program.getSyntacticDiagnostics(source), ...program.getSemanticDiagnostics(source)];
  const messages = found.map(({ messageText }) => ts.flattenDiagnosticMessageText(messageText, "\n"));
  const resource = resources[index];
  const { [resource.kind]: Model } = await import(moduleOf(resource));
  try {
    new Model(resource).validate();
  } catch (error) {
    messages.push(error.message);
  }
  wrong.push(messages);
}
console.log(JSON.stringify(wrong));
