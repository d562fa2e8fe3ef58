// Links of the guides. They are relative to the files of the repository; here they lead to pages of the console.
import { paths } from '../../lib/router.js';

const FOLDERS = { host: 'host/guide', sdk: 'guest-sdk/guide' };

/** Returns the address of a link in the guide `id`; null for files of the repository that the console does not have. */
export function resolveLink(href, id, known) {
  if (/^[a-z][a-z0-9+.-]*:/i.test(href) || href.startsWith('#')) return href;
  const [group, ...rest] = id.split('/');
  const base = new URL(`http://files/${FOLDERS[group] ?? group}/${rest.join('/')}.md`);
  let target;
  try { target = new URL(href, base); } catch { return null; }
  for (const [name, folder] of Object.entries(FOLDERS)) {
    const inside = target.pathname.match(new RegExp(`^/${folder}/?(.*)$`));
    if (!inside) continue;
    const page = `${name}/${inside[1].replace(/\.md$/, '') || 'README'}`;
    if (!known || known.some((guide) => guide.id === page)) return `${paths.docs(page)}${target.hash}`;
  }
  return null;
}
