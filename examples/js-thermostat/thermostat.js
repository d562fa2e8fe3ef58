// Sets the temperature of rooms, in JavaScript: one tool that the model calls with validated arguments, the
// tool loop, and the settings in the session's state.

import { Conversation } from 'skep:agent/inference-sync@0.1.1';
import { write } from 'skep:agent/log@0.1.1';
import { get, set } from 'skep:agent/state@0.1.1';

const ROOMS = 'rooms';

const setTemperature = {
  name: 'set_temperature',
  description: 'Sets the temperature of a room.',
  inputSchema: JSON.stringify({
    type: 'object',
    properties: {
      room: { type: 'string', enum: ['kitchen', 'bedroom', 'bathroom', 'office'] },
      celsius: { type: 'integer', minimum: 5, maximum: 28 },
    },
    required: ['room', 'celsius'],
    additionalProperties: false,
  }),
  hints: { readOnly: false, destructive: false, idempotent: true, openWorld: false },
  retries: 0,
  needsApproval: false,
};

/** The exports of `skep:agent/handler-sync`. A thrown value becomes the error of the WIT result. */
export const handlerSync = {
  describe: () => ({ description: 'Sets the temperature of rooms.', tools: [setTemperature] }),

  onMessage(message) {
    if (!/\d/.test(message.text)) {
      throw { tag: 'invalid-message', val: 'say which room and how many degrees' };
    }
    const rooms = read();
    const conversation = Conversation.open('main', undefined);
    conversation.setSystem('You set the temperature of rooms. Answer in one short sentence.');
    conversation.appendUser(message.text);

    const { toolCalls } = generate(conversation, { tag: 'named', val: setTemperature.name }, { tag: 'text' });
    for (const call of toolCalls) {
      const { room, celsius } = JSON.parse(call.arguments);
      rooms[room] = celsius;
      write('info', `${room}: ${celsius} degrees`);
      const outcome = { tag: 'ok', val: JSON.stringify({ room, celsius }) };
      conversation.appendToolResult({ callId: call.id, outcome });
    }
    set(ROOMS, new TextEncoder().encode(JSON.stringify(rooms)));

    // A very small model needs a fixed beginning of its answer.
    const warmest = Math.max(...Object.values(rooms));
    const form = { tag: 'regex', val: `Done\\. The warmest room has ${warmest} degrees[a-z ,]{0,40}\\.` };
    const { text } = generate(conversation, { tag: 'none' }, form);
    return { text, data: JSON.stringify({ rooms }) };
  },
};

function read() {
  const bytes = get(ROOMS);
  return bytes ? JSON.parse(new TextDecoder().decode(bytes)) : {};
}

function generate(conversation, toolChoice, output) {
  const options = {
    sampling: { temperature: 0 },
    maxTokens: 60,
    stop: [],
    tools: [setTemperature.name],
    toolChoice,
    output,
    visible: true,
  };
  try {
    return conversation.generate(options);
  } catch (error) {
    throw { tag: 'inference', val: error.payload };
  }
}
