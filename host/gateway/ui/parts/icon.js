// Icons as strokes on a grid of 16. They are decoration: the words beside them, or the label of their button, say what they mean.
import { html } from '../lib/html.js';

const PATHS = {
  playground: 'M2.5 3.5h11v7h-6l-3 2.5v-2.5h-2z M5.5 7h5',
  agents: 'M8 1.8l5.4 3.1v6.2L8 14.2l-5.4-3.1V4.9z M8 8l5.3-3 M8 8v6 M8 8L2.7 5',
  sessions: 'M3 3.5h10 M3 8h10 M3 12.5h6',
  inbox: 'M2 9l2-6h8l2 6v4H2z M2 9h3.5l1 2h3l1-2H14',
  engine: 'M1.8 9.5h2.7l2-6 3 9.5 2-5.5h2.7',
  cluster: 'M2 2.5h5v4H2z M9 2.5h5v4H9z M5.5 9.5h5v4h-5z M4.5 6.5v1.5h7V6.5 M8 8v1.5',
  usage: 'M3 13.5v-5 M8 13.5v-11 M13 13.5v-8',
  requests: 'M3 4.5h9.5 M10 2l2.5 2.5L10 7 M13 11.5H3.5 M6 9l-2.5 2.5L6 14',
  docs: 'M3 2.5h7.5l2.5 2.5v8.5H3z M5.5 7h5 M5.5 10h5',
  sun: 'M8 5.2a2.8 2.8 0 1 1 0 5.6 2.8 2.8 0 0 1 0-5.6z M8 1.3v1.5 M8 13.2v1.5 M1.3 8h1.5 M13.2 8h1.5 M3.3 3.3l1 1 M11.7 11.7l1 1 M12.7 3.3l-1 1 M4.3 11.7l-1 1',
  moon: 'M13 9.8A5.6 5.6 0 0 1 6.2 3 5.6 5.6 0 1 0 13 9.8z',
  system: 'M2 3h12v8H2z M6 13.5h4 M8 11v2.5',
  menu: 'M2.5 4h11 M2.5 8h11 M2.5 12h11',
  close: 'M3.5 3.5l9 9 M12.5 3.5l-9 9',
  plus: 'M8 3v10 M3 8h10',
  minus: 'M3 8h10',
  check: 'M3 8.5l3.5 3.5L13 4.5',
  copy: 'M5.5 5.5h8v8h-8z M10.5 5.5v-3h-8v8h3',
  play: 'M4.5 2.8v10.4L13 8z',
  stop: 'M4 4h8v8H4z',
  retry: 'M13 8a5 5 0 1 1-1.6-3.7 M13.2 1.8v3h-3',
  trash: 'M3 4.5h10 M6 4.5v-2h4v2 M4.3 4.5l.6 9h6.2l.6-9',
  edit: 'M3 13l.7-3 7-7 2.3 2.3-7 7z',
  down: 'M4 6l4 4 4-4',
  right: 'M6 4l4 4-4 4',
  left: 'M10 4L6 8l4 4',
  up: 'M4 10l4-4 4 4',
  search: 'M7 2.8a4.2 4.2 0 1 1 0 8.4 4.2 4.2 0 0 1 0-8.4z M10.2 10.2l3.3 3.3',
  warning: 'M8 2.3L14.3 13H1.7z M8 6.5v3 M8 11.2v.3',
  info: 'M8 1.8a6.2 6.2 0 1 1 0 12.4A6.2 6.2 0 0 1 8 1.8z M8 7.3v3.7 M8 4.8v.3',
  link: 'M6.5 9.5l3-3 M7 4.5l1.5-1.5a2.8 2.8 0 0 1 4 4L11 8.5 M9 11.5L7.5 13a2.8 2.8 0 0 1-4-4L5 7.5',
  external: 'M6 3H3v10h10v-3 M9 2.5h4.5V7 M13.5 2.5L7.5 8.5',
  download: 'M8 2.5v7.5 M4.8 7L8 10.2 11.2 7 M2.8 13.3h10.4',
  upload: 'M8 10.5V3 M4.8 6L8 2.8 11.2 6 M2.8 13.3h10.4',
  fork: 'M4.5 2.5v11 M4.5 9c5 0 7-1.5 7-4.5 M9.3 6.5l2.2-2.2 2.2 2.2',
  clock: 'M8 1.8a6.2 6.2 0 1 1 0 12.4A6.2 6.2 0 0 1 8 1.8z M8 4.5V8l2.5 1.5',
  tool: 'M9.8 2.5a3.5 3.5 0 0 0-3 5L2.5 11.8l1.7 1.7 4.3-4.3a3.5 3.5 0 0 0 4.8-4L11 7.3 8.7 5z',
  columns: 'M2.5 3h11v10h-11z M8 3v10',
  code: 'M5.5 4.5L2 8l3.5 3.5 M10.5 4.5L14 8l-3.5 3.5',
  key: 'M5 6.5a3 3 0 1 1 0 6 3 3 0 0 1 0-6z M7.2 7.3L13 1.8 M10.8 4l2 2',
  signout: 'M6.5 2.5h-4v11h4 M6.5 8h7 M11 5l3 3-3 3',
  lock: 'M3.5 7h9v6.5h-9z M5.5 7V4.8a2.5 2.5 0 0 1 5 0V7',
  table: 'M2.5 3h11v10h-11z M2.5 6.5h11 M6.5 6.5V13',
};

export const iconNames = Object.keys(PATHS);

export function Icon({ name, size = 16 }) {
  return html`<svg class="icon" width=${size} height=${size} viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.5"
    stroke-linecap="round" stroke-linejoin="round" aria-hidden="true" focusable="false"><path d=${PATHS[name] ?? ''} /></svg>`;
}
