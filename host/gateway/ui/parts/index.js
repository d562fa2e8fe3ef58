// All parts under one name, for pages: `import { Page, Table, Button } from '../parts/index.js'`.
// Charts are not among them: `../parts/chart.js` brings uPlot with it, which only pages with curves need.
export { Icon } from './icon.js';
export {
  Badge, Button, Copy, Empty, ErrorNote, Facts, Field, Figure, Loaded, Meter, More, Note, Skeleton, StateBadge, Time, Toggle,
} from './basics.js';
export { Page, Section, Tabs } from './page.js';
export { Confirm, Dialog, Toasts, toast } from './dialog.js';
export { Code, CodeTabs } from './code.js';
export { Table, VirtualList } from './table.js';
export { JsonTree } from './json-tree.js';
