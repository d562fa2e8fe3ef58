// Deploys an agent from a component and its manifest: by a dialog, or by dropping both onto the page.
import { api } from '../lib/api.js';
import { bytes } from '../lib/format.js';
import { useIsDrawn } from '../lib/hooks.js';
import { html, cx, useEffect, useRef, useState } from '../lib/html.js';
import { navigate, paths } from '../lib/router.js';
import { Button, ErrorNote, Field, Note } from './basics.js';
import { Dialog, toast } from './dialog.js';
import { Icon } from './icon.js';

const isManifest = (file) => /\.toml$/i.test(file.name);

/** Sorts dropped files: `{component, manifest}`; the manifest is read as text. */
async function sorted(files) {
  const found = {};
  for (const file of files) {
    if (/\.wasm$/i.test(file.name)) found.component = file;
    else if (isManifest(file)) found.manifest = await file.text();
  }
  return found;
}

/** Listens for files over the whole window. `onFiles` gets them when they are dropped; returns whether files are over it. */
export function useDrop(onFiles, when = true) {
  const [isOver, setOver] = useState(false);
  const latest = useRef(onFiles);
  latest.current = onFiles;
  useEffect(() => {
    if (!when) return undefined;
    const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes('Files');
    const over = (event) => { if (hasFiles(event)) { event.preventDefault(); setOver(true); } };
    const leave = (event) => { if (!event.relatedTarget) setOver(false); };
    const drop = (event) => { if (!hasFiles(event)) return; event.preventDefault(); setOver(false); latest.current([...event.dataTransfer.files]); };
    const all = [['dragover', over], ['dragleave', leave], ['drop', drop]];
    for (const [name, listener] of all) addEventListener(name, listener);
    return () => { for (const [name, listener] of all) removeEventListener(name, listener); };
  }, [when]);
  return isOver;
}

/** The layer that is shown over the page while files are dragged over it. */
export const DropHere = () => html`<div class="drop-here" aria-hidden="true"><div><${Icon} name="upload" size=${28} /><p>Drop a component (.wasm) and its agent.toml to deploy them</p></div></div>`;

/** `manifest` is what the editor begins with, for a new version of an agent. */
export function Deploy({ files = [], manifest: given = '', onClose, onDone }) {
  const [component, setComponent] = useState(null);
  const [manifest, setManifest] = useState(given);
  const [state, set] = useState({ busy: false, error: null });
  const [deployed, setDeployed] = useState(null);
  const input = useRef();
  const isDrawn = useIsDrawn();
  const takeFiles = async (list) => {
    const found = await sorted(list);
    if (found.component) setComponent(found.component);
    if (found.manifest !== undefined) setManifest(found.manifest);
    set({ busy: false, error: found.component || found.manifest !== undefined ? null : { message: 'Neither a .wasm file nor an agent.toml was among the files.' } });
  };
  useEffect(() => { if (files.length) takeFiles(files); }, [files]);
  const run = async () => {
    set({ busy: true, error: null });
    const form = new FormData();
    form.append('manifest', manifest);
    form.append('component', component, component.name);
    try {
      const agent = await (await api.raw('POST', '/v1/agents', { body: form })).json();
      toast(`Deployed ${agent.name}, version ${agent.version}`);
      onDone?.(agent);
      if (!isDrawn.current) return;
      if (agent.warnings?.length) { setDeployed(agent); set({ busy: false, error: null }); return; }
      onClose();
      navigate(paths.agent(agent.name));
    } catch (error) { set({ busy: false, error }); }
  };
  if (deployed) {
    return html`<${Dialog} title=${`${deployed.name} is deployed`} onClose=${onClose} actions=${html`<${Button} kind="primary" onClick=${() => { onClose(); navigate(paths.agent(deployed.name)); }}>Open the agent<//>`}>
      ${deployed.warnings.map((text) => html`<${Note} key=${text} tone="warn">${text}<//>`)}<//>`;
  }
  return html`<${Dialog} title="Deploy an agent" wide onClose=${onClose} actions=${html`<${Button} onClick=${onClose}>Cancel<//><${Button} kind="primary" icon="upload" busy=${state.busy} disabled=${!component || !manifest.trim()} onClick=${run}>Deploy<//>`}>
    <div class=${cx('drop-box', component && 'has')}>
      <${Icon} name=${component ? 'check' : 'upload'} size=${20} />
      <div class="grow">${component ? html`<strong>${component.name}</strong> <span class="muted">${bytes(component.size)}</span>` : html`<p>Drop the component (.wasm) and its agent.toml here</p><p class="muted small"><code>skep build</code> makes a component.</p>`}</div>
      <input class="sr-only" ref=${input} type="file" aria-label="Component and manifest" multiple accept=".wasm,.toml" tabindex="-1" onChange=${(event) => takeFiles([...event.currentTarget.files])} />
      <${Button} small onClick=${() => input.current.click()}>Choose files<//>
    </div>
    <${Field} label="agent.toml" hint="Its name, what wakes it, what it may do, and its limits.">${(id, note) => html`<textarea id=${id} aria-describedby=${note} class="mono" rows="12" spellcheck=${false} value=${manifest} placeholder=${'name = "my-agent"'} onInput=${(event) => setManifest(event.currentTarget.value)}></textarea>`}<//>
    <${ErrorNote} error=${state.error} title="It was not deployed." />
  <//>`;
}
