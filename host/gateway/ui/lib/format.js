// Numbers, sizes, durations, money and times as people read them. Nothing here knows a page.

const whole = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });
const some = new Map();

/** 1234567 → `1,234,567`; `–` for what is missing. */
export const number = (value) => (isNumber(value) ? whole.format(value) : '–');

/** A number with a fixed number of decimals. */
export function decimal(value, digits = 1) {
  if (!isNumber(value)) return '–';
  if (!some.has(digits)) {
    some.set(digits, new Intl.NumberFormat('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }
  return some.get(digits).format(value);
}

/** 1234567 → `1.2M`, 999 → `999`, 3.14 → `3.1`. */
export function short(value) {
  if (!isNumber(value)) return '–';
  const size = Math.abs(value);
  for (const [step, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
    if (size >= step) return `${trim(value / step)}${letter}`;
  }
  return Number.isInteger(value) ? String(value) : trim(value);
}

/** 1536 → `1.5 KiB`. */
export function bytes(value) {
  if (!isNumber(value)) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
  let unit = 0;
  let size = value;
  while (Math.abs(size) >= 1024 && unit < units.length - 1) { size /= 1024; unit += 1; }
  return `${unit === 0 ? whole.format(size) : trim(size)} ${units[unit]}`;
}

/** Milliseconds: `0.4 ms`, `82 ms`, `1.32 s`, `2 min 5 s`, `3 h 4 min`, `2 d 3 h`. */
export function duration(ms) {
  if (!isNumber(ms)) return '–';
  if (ms < 0) return `−${duration(-ms)}`;
  if (ms === 0) return '0 ms';
  if (ms < 0.01) return '< 0.01 ms';
  if (ms < 10) return `${decimal(ms, ms < 1 ? 2 : 1)} ms`;
  if (ms < 1000) return `${whole.format(ms)} ms`;
  if (ms < 10_000) return `${decimal(ms / 1000, 2)} s`;
  if (ms < 60_000) return `${decimal(ms / 1000, 1)} s`;
  const seconds = Math.round(ms / 1000);
  if (seconds < 3600) return pair(Math.floor(seconds / 60), 'min', seconds % 60, 's');
  if (seconds < 86_400) return pair(Math.floor(seconds / 3600), 'h', Math.floor((seconds % 3600) / 60), 'min');
  return pair(Math.floor(seconds / 86_400), 'd', Math.floor((seconds % 86_400) / 3600), 'h');
}

/** 0.934 → `93.4%`. */
export const percent = (share, digits = 1) => (isNumber(share) ? `${decimal(share * 100, digits)}%` : '–');

/** An amount in a currency; small amounts keep their digits. */
export function money(amount, currency = 'USD') {
  if (!isNumber(amount)) return '–';
  const digits = amount !== 0 && Math.abs(amount) < 0.01 ? 6 : 2;
  return new Intl.NumberFormat('en-US', { style: 'currency', currency, maximumFractionDigits: digits, minimumFractionDigits: 2 })
    .format(amount);
}

const zoned = {
  full: new Intl.DateTimeFormat(undefined, { dateStyle: 'medium', timeStyle: 'medium' }),
  day: new Intl.DateTimeFormat(undefined, { dateStyle: 'medium' }),
  clock: new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', second: '2-digit', hour12: false }),
  minute: new Intl.DateTimeFormat(undefined, { hour: '2-digit', minute: '2-digit', hour12: false }),
};

/** A time in milliseconds since 1970, in the viewer's zone: the day and the clock. */
export const time = (ms) => (isNumber(ms) ? zoned.full.format(ms) : '–');
/** Only the day. */
export const day = (ms) => (isNumber(ms) ? zoned.day.format(ms) : '–');
/** Only the clock. */
export const clock = (ms) => (isNumber(ms) ? zoned.clock.format(ms) : '–');
/** Hour and minute. */
export const minute = (ms) => (isNumber(ms) ? zoned.minute.format(ms) : '–');
/** The time in ISO 8601 with the zone UTC, for titles. */
export const iso = (ms) => (isNumber(ms) ? new Date(ms).toISOString() : '');

/** `now`, `12 s ago`, `in 5 min`. */
export function ago(ms, now = Date.now()) {
  if (!isNumber(ms)) return '–';
  const away = Math.abs(now - ms);
  if (away < 2000) return 'now';
  const text = shortSpan(away);
  return ms <= now ? `${text} ago` : `in ${text}`;
}

/** `1 call`, `3 calls`. */
export const count = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

function shortSpan(ms) {
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

const pair = (a, unitA, b, unitB) => (b ? `${a} ${unitA} ${b} ${unitB}` : `${a} ${unitA}`);
const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);
const trim = (value) => {
  const digits = Math.abs(value) >= 100 ? 0 : 1;
  return value.toFixed(digits).replace(/\.0$/, '');
};
