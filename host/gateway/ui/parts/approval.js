// A call that waits for a person: what it would do, and the decision.
import { api, url } from '../lib/api.js';
import { may } from '../lib/caller.js';
import { useAction, useNow } from '../lib/hooks.js';
import { html, useState } from '../lib/html.js';
import { inboxCount } from '../lib/inbox.js';
import { Link, paths } from '../lib/router.js';
import { Button, ErrorNote, Field, Time } from './basics.js';
import { toast } from './dialog.js';
import { Icon } from './icon.js';
import { Value } from './message.js';
import { SessionName } from './paged.js';

/** Letters of a reason that a toast shows. */
const SHOWN_REASON = 160;

/** `approval` is one of `/v1/approvals` or of a turn's events. `onDecided(id, decision)` is called after the host has taken the decision. `isShown` leaves out the arguments. */
export function ApprovalCard({ approval, caller, onDecided, isShown }) {
  const { id, agent, session, turn_id: turn, tool, arguments: args, created_at_ms: created, expires_at_ms: expires } = approval;
  const now = useNow(10_000);
  const [reason, setReason] = useState('');
  const [done, setDone] = useState(null);
  const [decide, { busy, error }] = useAction(async (decision) => {
    const given = reason.trim();
    await api.post(url`/v1/approvals/${id}`, { decision, ...(given ? { reason: given } : {}) });
    setDone(decision);
    inboxCount.set((was) => ({ ...was, approvals: Math.max(0, was.approvals - 1) }));
    toast(`${decision === 'approve' ? 'Approved' : 'Denied'} ${tool}${given && `: “${given.length > SHOWN_REASON ? `${given.slice(0, SHOWN_REASON)}…` : given}”`}`);
    onDecided?.(id, decision);
  });
  return html`<article class="approval" aria-label=${`Approval of ${tool}`}>
    <header class="approval-head"><${Icon} name="lock" /><span class="grow"><code class="approval-tool">${tool}</code> waits for a decision</span>
      <span class="muted small">${expires > now ? html`refused <${Time} ms=${expires} relative /> if nobody decides` : 'the time for it is over'}</span></header>
    ${agent && html`<p class="approval-from muted small"><${Link} href=${paths.agent(agent)}>${agent}<//> · <${Link} href=${paths.session(agent, session)}><${SessionName} id=${session} /><//>
      ${turn && html` · <${Link} href=${paths.turn(agent, session, turn)}>turn<//>`}${created && html` · asked <${Time} ms=${created} relative />`}</p>`}
    ${!isShown && html`<div class="approval-args"><${Value} value=${args} label=${`Arguments of ${tool}`} open=${2} /></div>`}
    ${may(caller, 'admin') ? (!done && html`<div class="approval-decide">
      <${Field} label="Reason" class="grow" hideLabel>${(field) => html`<input id=${field} value=${reason} placeholder="Reason (optional)" maxlength="1000" onInput=${(event) => setReason(event.currentTarget.value)} />`}<//>
      <div class="row"><${Button} kind="primary" icon="check" busy=${busy} onClick=${() => decide('approve')}>Approve<//>
      <${Button} icon="close" busy=${busy} onClick=${() => decide('deny')}>Deny<//></div></div>`)
      : html`<p class="muted small">A key with the role “admin” decides about this call.</p>`}
    ${done && html`<p class="muted" role="status">${done === 'approve' ? 'Approved. The turn continues.' : 'Denied. The model is notified.'}${reason.trim() && ` Your reason: “${reason.trim()}”`}</p>`}
    <${ErrorNote} error=${error} />
  </article>`;
}
