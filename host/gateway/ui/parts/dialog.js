// Dialogs and toasts.
import { html, cx, useEffect, useId, useRef, useState } from '../lib/html.js';
import { useIsDrawn } from '../lib/hooks.js';
import { createStore } from '../lib/store.js';
import { Button, ErrorNote, Field } from './basics.js';
import { Icon } from './icon.js';

/** A modal dialog; it is open while it is drawn. Escape and a click beside it close it. `actions` stand at its foot. */
export function Dialog({ title, onClose, children, actions, wide }) {
  const element = useRef();
  const id = useId();
  useEffect(() => {
    const dialog = element.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  const beside = (event) => { if (event.target === element.current) onClose(); };
  return html`<dialog ref=${element} class=${cx('dialog', wide && 'wide')} aria-labelledby=${id} onMouseDown=${beside}
    onCancel=${(event) => { event.preventDefault(); onClose(); }}>
    <div class="dialog-box">
      <header class="dialog-head"><h2 id=${id}>${title}</h2><${Button} kind="quiet" icon="close" label="Close" onClick=${onClose} /></header>
      <div class="dialog-body">${children}</div>
      ${actions && html`<footer class="dialog-foot">${actions}</footer>`}
    </div>
  </dialog>`;
}

/**
 * Asks before something that cannot be undone. `confirm()` may be asynchronous; its error is shown in the dialog. With `type`, the
 * person types that word first.
 */
export function Confirm({ title, children, action = 'Confirm', kind = 'danger', confirm, onClose, type }) {
  const [state, set] = useState({ busy: false, error: null });
  const [typed, setTyped] = useState('');
  const isDrawn = useIsDrawn();
  const run = async () => {
    set({ busy: true, error: null });
    try { await confirm(); if (isDrawn.current) onClose(); } catch (error) { set({ busy: false, error }); }
  };
  return html`<${Dialog} title=${title} onClose=${onClose} actions=${html`
      <${Button} onClick=${onClose}>Cancel<//>
      <${Button} kind=${kind} busy=${state.busy} disabled=${type && typed !== type} onClick=${run}>${action}<//>`}>
    ${children}
    ${type && html`<${Field} label=${`Type “${type}” to confirm`}>${(id) => html`<input id=${id} value=${typed} autocomplete="off" onInput=${(event) => setTyped(event.currentTarget.value)} />`}<//>`}
    <${ErrorNote} error=${state.error} />
  <//>`;
}

const toasts = createStore([]);
let lastToast = 0;

/** Says something for a moment: `toast('Deleted')`, `toast('…', {tone: 'bad'})`. */
export function toast(text, { tone = 'ok', ms = 4000, action } = {}) {
  const id = (lastToast += 1);
  const drop = () => toasts.set((all) => all.filter((each) => each.id !== id));
  toasts.set((all) => [...all.slice(-3), { id, text, tone, action, drop }]);
  setTimeout(drop, ms);
}

/** The corner in which toasts are shown; the shell draws it once. */
export function Toasts() {
  const all = toasts.use();
  return html`<div class="toasts" role="status" aria-live="polite">${all.map(({ id, text, tone, drop }) => html`
    <div class=${cx('toast', tone)} key=${id}><${Icon} name=${tone === 'bad' ? 'warning' : 'check'} /><span>${text}</span>
      <${Button} kind="quiet" small icon="close" label="Dismiss" onClick=${drop} /></div>`)}</div>`;
}
