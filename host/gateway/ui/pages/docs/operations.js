// The API's operations: one page for each tag.
import { callerStore } from '../../lib/caller.js';
import { html, cx, useEffect, useMemo, useState } from '../../lib/html.js';
import { count } from '../../lib/format.js';
import { Line, Markdown } from '../../lib/markdown.js';
import { Link, paths, useRoute } from '../../lib/router.js';
import { Badge, Button, Code, Empty, Icon } from '../../parts/index.js';
import { childrenOf, curlOf, resolve, tagsOf, typeOf } from './openapi.js';

/** The document's description of the whole API, and its tags. */
export function ApiOverview({ openapi }) {
  const tags = useMemo(() => tagsOf(openapi), [openapi]);
  return html`<div class="stack api-overview">
    <${Markdown} text=${openapi.info?.description ?? ''} />
    <div class="row"><${Badge}>version ${openapi.info?.version}<//><a href="/openapi.json" target="_blank" rel="noreferrer">openapi.json</a></div>
    <ul class="tag-cards">${tags.map(({ name, description, operations }) => html`<li key=${name}><${Link} class="card tag-card" href=${paths.docs(`api/${name}`)}>
      <strong>${name}</strong><span class="muted">${description}</span><span class="muted small">${count(operations.length, 'operation')}</span><//></li>`)}</ul>
  </div>`;
}

/** All operations of a tag. */
export function ApiTag({ openapi, tag }) {
  const { hash } = useRoute();
  const found = useMemo(() => tagsOf(openapi).find(({ name }) => name === tag), [openapi, tag]);
  const named = hash.slice(1);
  useEffect(() => {
    if (named) requestAnimationFrame(() => document.getElementById(named)?.scrollIntoView());
  }, [named]);
  if (!found) return html`<${Empty} icon="docs" title="The API has no such part" action=${html`<${Button} href=${paths.docs('api')}>The whole API<//>`} />`;
  return html`<div class="stack">
    <p class="muted">${found.description}</p>
    ${found.operations.map((operation) => html`<${Operation} key=${operation.id} openapi=${openapi} operation=${operation} isNamed=${operation.id === named} startsOpen=${found.operations.length === 1} />`)}
  </div>`;
}

function Operation({ openapi, operation, isNamed, startsOpen }) {
  const { id, method, path, summary, description } = operation;
  const [isOpen, open] = useState(isNamed || startsOpen);
  useEffect(() => { if (isNamed) open(true); }, [isNamed]);
  return html`<section class="operation card flush" id=${id} aria-label=${`${method.toUpperCase()} ${path}`}>
    <h2 class="operation-head"><button type="button" aria-expanded=${isOpen ? 'true' : 'false'} onClick=${() => open(!isOpen)}>
      <${Icon} name=${isOpen ? 'down' : 'right'} size=${14} /><span class=${`verb ${method}`}>${method}</span><code>${path}</code><span class="operation-summary"><${Line} text=${summary} /></span></button></h2>
    ${isOpen && html`<div class="operation-body">
      ${description && html`<${Markdown} text=${description} />`}
      <${Parameters} openapi=${openapi} parameters=${operation.parameters} />
      ${operation.requestBody && html`<h3>Body ${operation.requestBody.required ? '' : html`<span class="muted">optional</span>`}</h3><${Bodies} openapi=${openapi} content=${operation.requestBody.content} />`}
      <h3>Answers</h3>
      <div class="answers">${Object.entries(operation.responses ?? {}).map(([status, given]) => html`<${Answer} key=${status} openapi=${openapi} status=${status} answer=${resolve(openapi, given).schema} />`)}</div>
      <h3>As curl</h3>
      <${Code} text=${curlOf(openapi, operation, location.origin, callerStore.get().caller?.keys_required)} label=${`${summary} As curl`} />
      <p class="muted small"><${Link} href=${`#${id}`}>Address of this operation<//></p>
    </div>`}
  </section>`;
}

function Parameters({ openapi, parameters }) {
  if (!parameters.length) return null;
  const all = parameters.map((each) => resolve(openapi, each).schema);
  return html`<h3>Parameters</h3><div class="table-box" tabindex="0" role="group" aria-label="Parameters"><table class="table parameters">
    <thead><tr><th scope="col">Name</th><th scope="col">In</th><th scope="col">Type</th><th scope="col">Meaning</th></tr></thead>
    <tbody>${all.map((each) => html`<tr key=${each.in + each.name}><td><code>${each.name}</code>${each.required && html` <${Badge}>required<//>`}</td><td>${each.in}</td><td class="muted">${typeOf(openapi, each.schema ?? {})}</td><td class="wraps"><${Markdown} text=${each.description ?? ''} /></td></tr>`)}</tbody></table></div>`;
}

const Bodies = ({ openapi, content }) => html`${Object.entries(content ?? {}).map(([type, { schema }]) => html`<div key=${type} class="body"><p class="small muted"><code>${type}</code> · ${typeOf(openapi, schema ?? {})}</p>
  <${SchemaTree} openapi=${openapi} schema=${schema ?? {}} /></div>`)}`;

function Answer({ openapi, status, answer }) {
  const [isOpen, open] = useState(false);
  const hasBody = Object.keys(answer.content ?? {}).length > 0;
  const tone = status.startsWith('2') ? 'ok' : status.startsWith('4') ? 'warn' : status.startsWith('5') ? 'bad' : null;
  return html`<div class="answer">
    <${Badge} tone=${tone}>${status}<//><div class="answer-text"><${Markdown} text=${answer.description ?? ''} />
      ${hasBody && html`<button type="button" class="link small" aria-expanded=${isOpen ? 'true' : 'false'} onClick=${() => open(!isOpen)}>${isOpen ? 'Hide the body' : 'Show the body'}<span class="sr-only"> of ${status}</span></button>`}
      ${isOpen && html`<${Bodies} openapi=${openapi} content=${answer.content} />`}</div></div>`;
}

/** A schema as a tree. Its branches open on demand, so a schema may contain itself. */
export function SchemaTree({ openapi, schema }) {
  const parts = childrenOf(openapi, schema);
  if (!parts.length) {
    const { schema: found } = resolve(openapi, schema);
    return html`<div class="schema-tree"><${Meaning} openapi=${openapi} schema=${found} /></div>`;
  }
  return html`<ul class="schema-tree">${parts.map((part, n) => html`<${Property} key=${`${part.name}-${n}`} openapi=${openapi} part=${part} />`)}</ul>`;
}

function Property({ openapi, part }) {
  const { name, schema, isRequired, isChoice } = part;
  const [isOpen, open] = useState(false);
  const hasParts = childrenOf(openapi, schema).length > 0;
  const words = html`<span class=${cx('property-name', isChoice && 'muted')}>${name}</span><span class="property-type">${typeOf(openapi, schema)}</span>${isRequired && html`<${Badge}>required<//>`}`;
  return html`<li class="property">
    ${hasParts ? html`<button type="button" class="property-fold" aria-expanded=${isOpen ? 'true' : 'false'} onClick=${() => open(!isOpen)}><${Icon} name=${isOpen ? 'down' : 'right'} size=${12} />${words}</button>`
      : html`<div class="property-line">${words}</div>`}
    <${Meaning} openapi=${openapi} schema=${schema} />
    ${isOpen && html`<${SchemaTree} openapi=${openapi} schema=${schema} />`}
  </li>`;
}

const BOUNDS = [['minimum', 'at least'], ['maximum', 'at most'], ['minLength', 'characters, at least'], ['maxLength', 'characters, at most'], ['minItems', 'items, at least'], ['maxItems', 'items, at most'], ['pattern', 'matches']];

function Meaning({ openapi, schema: given }) {
  const { schema } = resolve(openapi, given);
  const text = given.description ?? schema.description;
  const facts = BOUNDS.filter(([key]) => schema[key] !== undefined).map(([key, words]) => `${words} ${schema[key]}`);
  if (schema.default !== undefined) facts.push(`by default ${JSON.stringify(schema.default)}`);
  const values = schema.enum ?? schema.items?.enum;
  if (!text && !facts.length && !values) return null;
  return html`<div class="meaning">${text && html`<${Markdown} text=${text} />`}
    ${values && html`<p class="row values">${values.map((value) => html`<code key=${String(value)}>${JSON.stringify(value)}</code>`)}</p>`}
    ${facts.length > 0 && html`<p class="muted small">${facts.join(' · ')}</p>`}</div>`;
}
