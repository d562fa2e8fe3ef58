// The page of use and its cost, the host's limits, keys and secrets.
import { may } from '../lib/caller.js';
import { html } from '../lib/html.js';
import { setQuery } from '../lib/router.js';
import { Note, Page, Tabs } from '../parts/index.js';
import { Keys } from '../parts/keys-panel.js';
import { HostLimits, TenantLimits } from '../parts/limits.js';
import { Secrets } from '../parts/secrets-panel.js';
import { UsageReport } from '../parts/usage-report.js';

export default function Usage({ caller, query }) {
  const isAdmin = may(caller, 'admin');
  const tabs = [{ id: 'usage', label: 'Usage' }, ...(caller.agents ? [] : [{ id: 'limits', label: 'Limits' }]), ...(isAdmin ? [{ id: 'keys', label: 'Keys' }, { id: 'secrets', label: 'Secrets' }] : [])];
  const wanted = ['limits', 'keys', 'secrets'].includes(query.tab) ? query.tab : 'usage';
  const tab = tabs.some(({ id }) => id === wanted) ? wanted : 'usage';
  return html`<${Page} title="Usage" wide about=${isAdmin ? 'What models were used for and what it cost, and who may use them.' : `What the models were used for by the tenant ${caller.tenant}, and what it cost.`}>
    ${wanted !== tab && html`<${Note}>${wanted === 'limits' ? 'A key for some agents only does not see the limits of its tenant.' : 'Keys and secrets concern all tenants: a key with the role “admin” sees them.'}<//>`}
    <${Tabs} label="Parts of the usage" tabs=${tabs} active=${tab} onSelect=${(id) => setQuery({ tab: id === 'usage' ? '' : id, since: '', by: '', unit: '', tenant: '' }, { replace: false })}>
      ${tab === 'usage' && html`<${UsageReport} caller=${caller} query=${query} />`}
      ${tab === 'limits' && html`<div class="stack wide-gap"><${TenantLimits} caller=${caller} tenant=${isAdmin ? query.tenant ?? '' : ''} />${isAdmin && html`<${HostLimits} />`}</div>`}
      ${tab === 'keys' && html`<${Keys} caller=${caller} />`}
      ${tab === 'secrets' && html`<${Secrets} />`}<//>
  <//>`;
}
