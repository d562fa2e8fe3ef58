// The grants that an agent asks for in its `agent.toml`, and which of them the host's `skep.toml` and its secrets allow.
import { html } from '../lib/html.js';
import { Badge, Empty } from './basics.js';
import { readValue } from './toml.js';

/** Returns whether a pattern in which `*` stands for anything covers a name or another pattern. */
export function covers(pattern, name) {
  if (pattern === '*' || pattern === name) return true;
  const parts = String(pattern).split('*').map((part) => part.replace(/[.+?^${}()|[\]\\]/g, '\\$&'));
  return new RegExp(`^${parts.join('[^/]*')}$`).test(String(name));
}

/** Reads `[grants]` of the host from the settings of `/v1/config`. */
export function hostGrants(config) {
  const of = (key) => {
    const setting = config?.settings.find((each) => each.section === '[grants]' && each.key === key);
    const value = setting && readValue(setting.value);
    return Array.isArray(value) ? value : null;
  };
  return { models: of('models'), tools: of('tools') ?? [], hosts: of('hosts') ?? [] };
}

/**
 * Returns the grants as rows `{kind, name, note, state}`; `state` is `granted`, `refused` or `unknown` where the caller may not see what the host allows.
 * `secrets` are those of `/v1/secrets`.
 */
export function grantRows(manifest, { agent, model, config, secrets }) {
  const asked = manifest?.grants ?? {};
  const host = config ? hostGrants(config) : null;
  const rows = [];
  const add = (kind, name, isGranted, note) => rows.push({ kind, name, note, state: isGranted === null ? 'unknown' : isGranted ? 'granted' : 'refused' });
  const within = (list, name) => (host ? list.some((pattern) => covers(pattern, name)) : null);
  add('Model', model, host ? host.models === null || within(host.models, model) : null, 'its own');
  for (const name of asked.models ?? []) if (name !== model) add('Model', name, host && within(host.models ?? [model], name));
  for (const name of asked.tools ?? []) add('Tool', name, host && within(host.tools, name), manifest.tools?.[name]?.approval ? 'each call needs an approval' : null);
  for (const name of asked.hosts ?? []) add('Host', name, host && within(host.hosts, name));
  for (const { name, hosts = [] } of asked.secrets ?? []) {
    const known = secrets?.find((secret) => secret.name === name && (secret.agent === null || secret.agent === agent));
    const isSent = known && hosts.every((origin) => known.hosts.some((pattern) => covers(pattern, origin)));
    add('Secret', name, secrets ? !!isSent : null, known && !isSent ? `set, but not for ${hosts.join(', ')}` : hosts.length ? `sent to ${hosts.join(', ')}` : null);
  }
  for (const name of asked.events ?? []) add('Event', name, true, 'may be emitted');
  if (asked.clocks) add('Clocks', 'wall clock and monotonic clock', true);
  if (asked.random) add('Randomness', 'random numbers', true);
  return rows;
}

const STATES = { granted: ['ok', 'Granted'], refused: ['bad', 'Not granted'], unknown: [null, 'Asked for'] };
const ADVICE = { Model: 'models', Tool: 'tools', Host: 'hosts' };

export function Grants({ rows }) {
  if (!rows.length) return html`<${Empty} title="It asks for nothing">It has its session’s state, its log, timers and the host’s model.<//>`;
  return html`<ul class="grants">${rows.map(({ kind, name, note, state }) => html`<li key=${`${kind} ${name}`}>
    <span class="grant-kind">${kind}</span>
    <span class="grant-name"><code>${name}</code>${note && html`<span class="muted small">${note}</span>`}
      ${state === 'refused' && html`<span class="small bad-text">${kind === 'Secret' ? html`Set it with <code>skep secret set ${name}</code>.` : html`Add it to <code>${ADVICE[kind]}</code> under <code>[grants]</code> in skep.toml.`}</span>`}</span>
    <${Badge} tone=${STATES[state][0]}>${STATES[state][1]}<//></li>`)}</ul>`;
}
