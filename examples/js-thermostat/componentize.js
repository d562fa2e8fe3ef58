// Builds the component of thermostat.js for the world `agent-sync`, because imports of componentize-js cannot
// be async.

import { writeFile } from 'node:fs/promises';
import { componentize } from '@bytecodealliance/componentize-js';

const { component } = await componentize({
  sourcePath: 'thermostat.js',
  witPath: '../../wit/skep-agent',
  worldName: 'agent-sync',
  // An agent has no direct network access.
  disableFeatures: ['http', 'fetch-event'],
});
await writeFile('js-thermostat.wasm', component);
