// The box in which one writes a message to an agent.
import { html, useLayoutEffect, useRef, useState } from '../lib/html.js';
import { Button, ErrorNote } from './basics.js';
import { parsed } from './message.js';

/** `onSend({text, data?})` may throw the host's refusal. Enter sends, Shift and Enter makes a new line. */
export function Composer({ onSend, placeholder = 'Message', disabled, focus }) {
  const [text, setText] = useState('');
  const [data, setData] = useState(null);
  const [state, setState] = useState({ busy: false, error: null });
  const area = useRef();
  useLayoutEffect(() => {
    const element = area.current;
    element.style.height = 'auto';
    element.style.height = `${Math.min(element.scrollHeight + 2, 220)}px`;
  }, [text]);
  useLayoutEffect(() => { if (focus) area.current.focus(); }, []);
  const send = async () => {
    const value = data === null ? undefined : parsed(data);
    if (data !== null && value === undefined) { setState({ busy: false, error: { message: 'The data is not JSON.' } }); return; }
    if ((!text.trim() && value === undefined) || state.busy) return;
    setState({ busy: true, error: null });
    try {
      await onSend({ text, ...(value === undefined ? {} : { data: value }) });
      // A person may have begun the next message while the host took this one.
      setText((now) => (now === text ? '' : now));
      setData((now) => (now === data ? null : now));
      setState({ busy: false, error: null });
      area.current?.focus();
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  const key = (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  return html`<form class="sender" aria-label="Send a message" onSubmit=${(event) => { event.preventDefault(); send(); }}>
    <${ErrorNote} error=${state.error} />
    <div class="sender-box">
      <textarea ref=${area} rows="1" aria-label="Message" placeholder=${placeholder} value=${text} disabled=${disabled} onInput=${(event) => setText(event.currentTarget.value)} onKeyDown=${key}></textarea>
      ${data !== null && html`<textarea class="mono sender-data" rows="3" aria-label="Data as JSON" placeholder='{"any": "JSON"}' value=${data} spellcheck=${false} onInput=${(event) => setData(event.currentTarget.value)}></textarea>`}
      <div class="sender-foot"><${Button} kind="quiet" small icon=${data === null ? 'plus' : 'close'} onClick=${() => setData(data === null ? '' : null)}>${data === null ? 'Add data' : 'Leave the data out'}<//>
        <span class="sender-hint muted small">Enter sends</span><${Button} kind="primary" small icon="up" type="submit" busy=${state.busy} disabled=${disabled || (!text.trim() && !data)}>Send<//></div>
    </div>
  </form>`;
}
