// Makes the component of thermostat.js for the world `agent-sync`: imports of componentize-js cannot be asynchronous.

import { writeFile } from 'node:fs/promises';
import { componentize } from '@bytecodealliance/componentize-js';

const { component } = await componentize({
  sourcePath: 'thermostat.js',
  witPath: '../../wit/skep-agent',
  worldName: 'agent-sync',
  // An agent has no network of its own.
  disableFeatures: ['http', 'fetch-event'],
});
await writeFile('js-thermostat.wasm', component);
