// The deployed agents.
import { api } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { count, number } from '../lib/format.js';
import { usePolled } from '../lib/hooks.js';
import { html, useState } from '../lib/html.js';
import { paths } from '../lib/router.js';
import { Button, Empty, Loaded, Note, Page, Table, Time } from '../parts/index.js';
import { Deploy, DropHere, useDrop } from '../parts/deploy.js';
import { Search } from '../parts/paged.js';

const COLUMNS = [
  { key: 'name', label: 'Agent', width: '14rem' },
  { key: 'description', label: 'What it does', render: ({ description }) => html`<span class="muted">${description || '–'}</span>`, optional: true },
  { key: 'version', label: 'Version', align: 'right', width: '5rem', render: ({ version }) => number(version) },
  { key: 'model', label: 'Model', optional: true },
  { key: 'tools', label: 'Tools', align: 'right', width: '5rem', optional: true, render: ({ tools }) => html`<span title=${tools.join(', ')}>${number(tools.length)}</span>` },
  { key: 'at', label: 'Deployed', width: '8rem', render: ({ deployed_at_ms: ms }) => html`<${Time} ms=${ms} relative />` },
];

export default function Agents({ caller }) {
  const agents = usePolled((signal) => api.get('/v1/agents', { signal }), [], { everyMs: 10_000 });
  const [search, setSearch] = useState('');
  const [files, deploy] = useState(null);
  const canDeploy = may(caller, 'admin');
  const isOver = useDrop(deploy, canDeploy);
  const wanted = search.trim().toLowerCase();
  const shown = (list) => list.filter(({ name, description }) => `${name} ${description}`.toLowerCase().includes(wanted));
  return html`<${Page} title="Agents" about="What runs here: WebAssembly components with tools, limits and sessions of their own." wide
    actions=${canDeploy && html`<${Button} kind="primary" icon="upload" onClick=${() => deploy([])}>Deploy<//>`}>
    <${Loaded} resource=${agents} lines=${6}>${({ data, failed }) => html`
      ${failed.map(({ name, reason }) => html`<${Note} tone="warn" key=${name}><strong>${name}</strong> could not be started again: ${reason}<//>`)}
      ${data.length > 7 && html`<div class="filters"><${Search} label="Search agents" value=${search} onInput=${setSearch} /><span class="filter-count muted small" role="status">${count(shown(data).length, 'agent')}</span></div>`}
      <div class="card flush"><${Table} label="Agents" columns=${COLUMNS} rows=${shown(data)} rowKey=${({ name }) => name} hrefOf=${({ name }) => paths.agent(name)} max="max(320px, calc(100dvh - 190px))"
        empty=${wanted ? html`<${Empty} icon="search" title="No agent matches" />` : html`<${Empty} icon="agents" title="No agents yet" action=${canDeploy && html`<${Button} kind="primary" icon="upload" onClick=${() => deploy([])}>Deploy<//>`}>
          ${canDeploy ? html`<p>Drop a component (.wasm) and its agent.toml anywhere on this page, or run <code>skep new my-agent && skep deploy my-agent</code>.</p>` : html`<p>A key with the role “admin” deploys agents.</p>`}<//>`} /></div>`}<//>
    ${isOver && html`<${DropHere} />`}
    ${files && html`<${Deploy} files=${files} onClose=${() => deploy(null)} onDone=${agents.reload} />`}
  <//>`;
}
