// The theme: as the system says, or as the person chose. `theme.js` beside index.html sets it before the first paint.
import { createStore } from './store.js';

const dark = matchMedia('(prefers-color-scheme: dark)');
const chosen = () => document.documentElement.dataset.theme ?? 'system';

/** `{choice: 'system' | 'light' | 'dark', shown: 'light' | 'dark'}`. */
export const theme = createStore(read());

function read() {
  const choice = chosen();
  return { choice, shown: choice === 'system' ? (dark.matches ? 'dark' : 'light') : choice };
}

/** Chooses a theme and keeps it in this browser. */
export function setTheme(choice) {
  if (choice === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  try {
    if (choice === 'system') localStorage.removeItem('skep-theme');
    else localStorage.setItem('skep-theme', choice);
  } catch { /* The choice then lasts as long as the page. */ }
  theme.set(read());
}
dark.addEventListener('change', () => theme.set(read()));

/** Returns a colour of the theme: `colour('--chart-1')`. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
