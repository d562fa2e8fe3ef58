// The replicas of a model and the ranks that each is divided among: where they are, what they do now, and the memory of each.
import { bytes, duration, number, percent, short } from '../../lib/format.js';
import { html } from '../../lib/html.js';
import { Section } from '../../parts/index.js';
import { newest, recent } from './history.js';

const KINDS = [['weights', 'Weights'], ['kv', 'KV cache'], ['activations', 'Activations'], ['graphs', 'CUDA graphs']];

const sizeOf = (memory, kind) => memory?.find((each) => each.kind === kind)?.bytes ?? 0;
const whole = (memory) => (memory ?? []).reduce((sum, each) => sum + each.bytes, 0);

/** The table is there for models with several replicas or ranks: for the others, the rest of the page says the same. `times` has those of the ranks. */
export function Replicas({ model, times }) {
  const replicas = model.replica_memory ?? [];
  const hasRanks = replicas.some(({ ranks }) => ranks?.length > 1);
  if (replicas.length < 2 && !hasRanks) return null;
  const hasTimes = times.length > 0;
  const kinds = KINDS.filter(([kind]) => replicas.some(({ memory }) => sizeOf(memory, kind) > 0));
  // A single replica has the figures of the whole model.
  const figures = (n) => (replicas.length > 1 ? model.each_replica[n] : model.columns) ?? {};
  const cells = (memory) => html`${kinds.map(([kind]) => html`<td class="num optional" key=${kind}>${bytes(sizeOf(memory, kind))}</td>`)}<td class="num">${bytes(whole(memory))}</td>`;
  return html`<${Section} title=${hasRanks ? 'Replicas and ranks' : 'Replicas'} flush
    about=${hasRanks ? 'The ranks of a replica compute each step together, so its times cover all of them. Buffers that ranks share count for the replica.' : 'Replicas on one device share its weights, which each of them counts.'}>
    <div class="table-box" tabindex="0" role="group" aria-label="Replicas"><table class="table replica-table"><caption class="sr-only">Replicas</caption>
      <thead><tr><th scope="col">Replica</th><th scope="col" class="optional">Device</th><th scope="col" class="num">Tokens</th><th scope="col" class="num">Running</th><th scope="col" class="num optional">Waiting</th><th scope="col" class="num" title="Median, mean of the last minute">Step</th><th scope="col" class="num optional">KV pages</th>
        ${hasTimes && html`<th scope="col" class="num optional" title="Time in a step that the rank did not wait, mean since the model was loaded">Computes</th><th scope="col" class="num optional" title="Time in a step that the rank waited for others, mean since the model was loaded">Waits</th>`}
        ${kinds.map(([kind, label]) => html`<th scope="col" class="num optional" key=${kind}>${label}</th>`)}<th scope="col" class="num">Memory</th></tr></thead>
      <tbody>${replicas.map(({ device, memory, ranks = [] }, n) => {
        const columns = figures(n);
        const used = newest(columns, 'pages_used');
        return html`<tr key=${n}><td><strong>Replica ${n + 1}</strong></td><td class="optional" title=${device}>${device}</td>
            <td class="num">${short(newest(columns, 'generated_tokens_s') ?? 0)}/s</td><td class="num">${number(newest(columns, 'running') ?? 0)}</td><td class="num optional">${number(newest(columns, 'waiting') ?? 0)}</td>
            <td class="num">${duration(recent(columns, 'step_ms_p50'))}</td><td class="num optional">${used === null ? '–' : `${number(used)} of ${number(newest(columns, 'pages_total'))}`}</td>${hasTimes && html`<td class="optional"></td><td class="optional"></td>`}${cells(memory)}</tr>
          ${ranks.map((rank, k) => html`<tr key=${`${n} ${k}`} class="rank-row"><td>Rank ${k + 1} <span class="muted small">${placeOf(rank, ranks)}</span></td><td class="optional" title=${rank.device}>${rank.device}</td>
            <td></td><td></td><td class="optional"></td><td></td><td class="optional"></td>${hasTimes && html`<${Times} time=${times.find(({ replica, stage, shard }) => replica === n && stage === rank.stage && shard === rank.shard)} />`}${cells(rank.memory)}</tr>`)}`;
      })}</tbody></table></div>
  <//>`;
}

/** The time of a rank in a step, and what it waits of that. */
function Times({ time }) {
  const { steps = 0, computing_us: computing, waiting_us: waiting } = time ?? {};
  if (!steps) return html`<td class="num optional">–</td><td class="num optional">–</td>`;
  const each = (us) => duration(us / steps / 1000);
  return html`<td class="num optional">${each(computing)}</td><td class="num optional">${each(waiting)} <span class="muted small">${percent(waiting / Math.max(1, computing + waiting), 0)}</span></td>`;
}

/** The stage of a rank and its part of each weight, where there are several. */
function placeOf({ stage, shard }, ranks) {
  const stages = 1 + Math.max(...ranks.map((rank) => rank.stage));
  const shards = 1 + Math.max(...ranks.map((rank) => rank.shard));
  return [stages > 1 && `stage ${stage + 1} of ${stages}`, shards > 1 && `part ${shard + 1} of ${shards}`].filter(Boolean).join(', ');
}
