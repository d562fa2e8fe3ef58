// The theme: as the system says, or as the person chose. The document always says which one it shows (`data-theme`), so that the colors of each
// are written once; `theme.js` beside index.html does that before the first paint.
import { createStore } from './store.js';

const dark = matchMedia('(prefers-color-scheme: dark)');
const { dataset } = document.documentElement;

/** `{choice: 'system' | 'light' | 'dark', shown: 'light' | 'dark'}`. */
export const theme = createStore({ choice: dataset.choice ?? 'system', shown: dataset.theme });

function show() {
  const choice = dataset.choice ?? 'system';
  dataset.theme = dataset.choice ?? (dark.matches ? 'dark' : 'light');
  theme.set({ choice, shown: dataset.theme });
}

/** Chooses a theme and keeps it in this browser. */
export function setTheme(choice) {
  if (choice === 'system') delete dataset.choice;
  else dataset.choice = choice;
  try {
    if (choice === 'system') localStorage.removeItem('skep-theme');
    else localStorage.setItem('skep-theme', choice);
  } catch { /* The choice then lasts as long as the page. */ }
  show();
}
dark.addEventListener('change', show);

/** Returns a color of the theme: `color('--chart-1')`. */
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
