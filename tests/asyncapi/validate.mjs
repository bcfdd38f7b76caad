// Validate AsyncAPI documents with the official parser: node validate.mjs NODE_MODULES < cases.json
//
// A case is {document, deliveries: [{message, headers, payload}]}, message being a key of the
// document's components. Prints for each case what the parser says, the operations that it found,
// and how each delivery differs from the schemas of its message.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(`${process.argv[2]}/`);
const { Parser, DiagnosticSeverity } = require("@asyncapi/parser");
const { default: Ajv } = require("ajv");
const { default: addFormats } = require("ajv-formats");

const found = [];
for (const { document: source, deliveries } of JSON.parse(readFileSync(0, "utf8"))) {
  const { document, diagnostics } = await new Parser().parse(JSON.stringify(source));
  const ajv = addFormats(new Ajv({ strict: false, logger: false, allErrors: true }));
  ajv.addSchema(source, "document");
  const differences = (path, value) => {
    const matches = ajv.compile({ $ref: `document#/components/${path}` });
    return matches(value) ? [] : matches.errors.map((each) => `${each.instancePath} ${each.message}`);
  };
  found.push({
    diagnostics: diagnostics.map(({ severity, code, message, path }) => ({
      severity: DiagnosticSeverity[severity], code, message, path: path.join("/"),
    })),
    operations: Object.fromEntries((document?.operations().all() ?? []).map((each) => [
      each.id(),
      {
        action: each.action(),
        channels: each.channels().all().map((channel) => channel.address()),
        messages: each.messages().all().map((message) => message.name()),
      },
    ])),
    deliveries: deliveries.map(({ message, headers, payload }) => [
      ...source.components.messages[message].traits.flatMap(({ $ref }) =>
        differences(`${$ref.replace("#/components/", "")}/headers`, headers)),
      ...differences(`messages/${message}/payload`, payload),
    ]),
  });
}
console.log(JSON.stringify(found));
