// Reads the OpenAPI document: operations by tag, schemas, and examples of bodies.

const METHODS = ['get', 'post', 'put', 'patch', 'delete'];

/** Returns `[{name, description, operations: [{id, method, path, summary, description, parameters, requestBody, responses}]}]`. */
export function tagsOf(openapi) {
  const all = (openapi.tags ?? []).map(({ name, description }) => ({ name, description, operations: [] }));
  for (const [path, methods] of Object.entries(openapi.paths ?? {})) {
    for (const method of METHODS) {
      const operation = methods[method];
      if (!operation) continue;
      const name = operation.tags?.[0] ?? 'other';
      let tag = all.find((each) => each.name === name);
      if (!tag) all.push(tag = { name, description: '', operations: [] });
      const parameters = [...(methods.parameters ?? []), ...(operation.parameters ?? [])];
      tag.operations.push({ ...operation, parameters, id: operation.operationId ?? `${method}-${path}`, method, path });
    }
  }
  return all.filter(({ operations }) => operations.length);
}

/** Follows `$ref`. Returns `{schema, name}`; `name` is that of the component. */
export function resolve(openapi, schema) {
  let name = null;
  let found = schema;
  for (let steps = 0; found?.$ref && steps < 8; steps += 1) {
    const way = found.$ref.replace(/^#\//, '').split('/');
    name = way.at(-1);
    found = way.reduce((value, part) => value?.[part], openapi);
  }
  return { schema: found ?? {}, name };
}

/** Says the type of a schema in words: `string`, `array of Message`, `object`, `null or integer`. */
export function typeOf(openapi, given) {
  const { schema, name } = resolve(openapi, given);
  const isPlain = typeof schema.type === 'string' && !['object', 'array'].includes(schema.type);
  if (name && !isPlain) return name;
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === 'array') return `array of ${typeOf(openapi, schema.items ?? {})}`;
  const choices = schema.oneOf ?? schema.anyOf;
  if (choices) return [...new Set(choices.map((each) => typeOf(openapi, each)))].slice(0, 4).join(' or ') + (choices.length > 4 ? ' or …' : '');
  if (schema.allOf) return schema.allOf.length === 1 ? typeOf(openapi, schema.allOf[0]) : 'object';
  if (Array.isArray(schema.type)) return schema.type.join(' or ');
  return [schema.type ?? (schema.properties ? 'object' : 'any'), schema.format && `(${schema.format})`].filter(Boolean).join(' ');
}

/** Returns what stands below a schema in the tree: properties, or the choices among schemas. */
export function childrenOf(openapi, given) {
  const { schema } = resolve(openapi, given);
  if (schema.type === 'array') return childrenOf(openapi, schema.items ?? {});
  const parts = [];
  const required = new Set(schema.required ?? []);
  for (const [name, value] of Object.entries(schema.properties ?? {})) parts.push({ name, schema: value, isRequired: required.has(name) });
  for (const each of schema.allOf ?? []) parts.push(...childrenOf(openapi, each));
  const choices = (schema.oneOf ?? schema.anyOf ?? []).filter((each) => resolve(openapi, each).schema.type !== 'null');
  if (choices.length === 1) parts.push(...childrenOf(openapi, choices[0]));
  else if (choices.some((each) => childrenOf(openapi, each).length)) choices.forEach((each, n) => parts.push({ name: `choice ${n + 1}`, schema: each, isChoice: true }));
  if (typeof schema.additionalProperties === 'object') parts.push({ name: 'any other name', schema: schema.additionalProperties, isChoice: true });
  return parts;
}

/** Makes an example of a body: what is required, and what has an example or a default. */
export function exampleOf(openapi, given, depth = 0) {
  const { schema } = resolve(openapi, given);
  for (const known of [schema.example, schema.examples?.[0], schema.const, schema.default, schema.enum?.[0]]) if (known !== undefined) return known;
  if (depth > 5) return null;
  if (schema.allOf) return Object.assign({}, ...schema.allOf.map((each) => exampleOf(openapi, each, depth + 1)));
  const choices = (schema.oneOf ?? schema.anyOf)?.filter((each) => resolve(openapi, each).schema.type !== 'null');
  if (choices?.length) return exampleOf(openapi, choices[0], depth + 1);
  const type = Array.isArray(schema.type) ? schema.type.find((each) => each !== 'null') : schema.type;
  if (type === 'array') return depth > 3 ? [] : [exampleOf(openapi, schema.items ?? {}, depth + 1)];
  if (type === 'object' || schema.properties) {
    const names = (schema.required ?? []).filter((name) => schema.properties?.[name]);
    return Object.fromEntries(names.map((name) => [name, exampleOf(openapi, schema.properties[name], depth + 1)]));
  }
  return { string: 'text', integer: schema.minimum ?? 1, number: schema.minimum ?? 1, boolean: false }[type] ?? null;
}

/** Writes an operation as curl, with `{names}` of the path as variables of the shell. */
export function curlOf(openapi, { method, path, requestBody, parameters }, origin, keysRequired) {
  const query = parameters.filter((each) => each.in === 'query' && each.required).map(({ name }) => `${name}=$${name}`).join('&');
  const address = `${origin}${path.replace(/\{\*?(\w+)\}/g, '$$$1')}${query && `?${query}`}`;
  const lines = [`curl -s${method === 'get' ? '' : ` -X ${method.toUpperCase()}`} "${address}"`];
  if (keysRequired) lines.push('  -H "authorization: Bearer $SKEP_API_KEY"');
  const [type, content] = Object.entries(requestBody?.content ?? {})[0] ?? [];
  if (type === 'application/json') {
    const body = JSON.stringify(exampleOf(openapi, content.schema ?? {}), null, 2).replaceAll("'", "'\\''");
    lines.push("  -H 'content-type: application/json'", `  -d '${body}'`);
  } else if (type === 'multipart/form-data') {
    const { schema } = resolve(openapi, content.schema ?? {});
    for (const name of Object.keys(schema.properties ?? {})) lines.push(`  -F '${name}=@${name}'`);
  } else if (type) lines.push(`  -H 'content-type: ${type}'`, '  --data-binary @body');
  return lines.join(' \\\n');
}
