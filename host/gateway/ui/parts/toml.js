// Reads TOML as far as `agent.toml` and `skep.toml` use it: tables, arrays of tables, strings, numbers, booleans, arrays and inline tables.

/** Returns the document as an object, or null if it cannot be read. */
export function readToml(text) {
  try {
    const root = {};
    let table = root;
    const source = new Source(text);
    for (source.blank(); !source.isAtEnd(); source.blank()) {
      if (source.take('[[')) {
        const keys = source.keys();
        source.expect(']]');
        const name = keys.pop();
        const parent = inside(root, keys);
        table = {};
        (Object.hasOwn(parent, name) ? parent[name] : (parent[name] = [])).push(table);
      } else if (source.take('[')) {
        table = inside(root, source.keys());
        source.expect(']');
      } else {
        source.pair(table);
      }
    }
    return root;
  } catch {
    return null;
  }
}

/** Reads one value, such as those of `/v1/config`; undefined if it cannot be read. */
export function readValue(text) {
  try { return new Source(text).value(); } catch { return undefined; }
}

function inside(table, keys) {
  return keys.reduce((at, key) => {
    if (!Object.hasOwn(at, key)) Object.defineProperty(at, key, { value: {}, enumerable: true, configurable: true, writable: true });
    return Array.isArray(at[key]) ? at[key].at(-1) : at[key];
  }, table);
}

const ESCAPES = { b: '\b', t: '\t', n: '\n', f: '\f', r: '\r', e: '\u001b', '"': '"', '\\': '\\' };

class Source {
  constructor(text) { this.text = String(text); this.at = 0; }

  isAtEnd() { return this.at >= this.text.length; }

  match(pattern) {
    const sticky = new RegExp(pattern, 'y');
    sticky.lastIndex = this.at;
    const found = sticky.exec(this.text);
    if (found) this.at = sticky.lastIndex;
    return found;
  }

  /** Skips spaces, lines and comments. */
  blank() { this.match(/(?:\s|#[^\n]*)*/); }

  take(word) {
    if (!this.text.startsWith(word, this.at)) return false;
    this.at += word.length;
    return true;
  }

  expect(word) {
    this.match(/[ \t]*/);
    if (!this.take(word)) throw new SyntaxError(`expected ${word}`);
  }

  keys() {
    const keys = [];
    do {
      this.match(/[ \t]*/);
      keys.push(/["']/.test(this.text[this.at]) ? this.string() : this.match(/[\w-]+/)[0]);
      this.match(/[ \t]*/);
    } while (this.take('.'));
    return keys;
  }

  pair(table) {
    const keys = this.keys();
    this.expect('=');
    const name = keys.pop();
    Object.defineProperty(inside(table, keys), name, { value: this.value(), enumerable: true, configurable: true, writable: true });
  }

  value() {
    this.blank();
    const first = this.text[this.at];
    if (first === '"' || first === "'") return this.string();
    if (first === '[') return this.list('[', ']', (all) => all.push(this.value()), []);
    if (first === '{') return this.list('{', '}', (all) => this.pair(all), {});
    const [word] = this.match(/[^\s,\]}#]+/);
    if (word === 'true' || word === 'false') return word === 'true';
    const plain = Number(word.replaceAll('_', ''));
    return Number.isNaN(plain) ? word : plain;
  }

  list(open, close, one, all) {
    this.take(open);
    for (this.blank(); !this.take(close); this.blank()) {
      one(all);
      this.blank();
      if (!this.take(',')) { this.expect(close); break; }
    }
    return all;
  }

  string() {
    for (const mark of ['"""', "'''", '"', "'"]) {
      if (!this.take(mark)) continue;
      const isPlain = mark[0] === "'";
      if (mark.length === 3) this.match(/\r?\n/);
      let text = '';
      while (!this.take(mark)) {
        if (this.isAtEnd()) throw new SyntaxError('a string has no end');
        const letter = this.text[this.at];
        this.at += 1;
        text += letter === '\\' && !isPlain ? this.escaped() : letter;
      }
      return text;
    }
    throw new SyntaxError('expected a string');
  }

  escaped() {
    const code = this.match(/u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})/);
    if (code) return String.fromCodePoint(parseInt(code[1] ?? code[2], 16));
    if (this.match(/[ \t]*\r?\n\s*/)) return '';
    const letter = this.text[this.at];
    this.at += 1;
    return ESCAPES[letter] ?? letter;
  }
}
