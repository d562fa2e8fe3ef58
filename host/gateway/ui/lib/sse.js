// Reads server-sent events from a fetch stream. EventSource cannot send headers, so the console reads streams itself.

/** Returns a function that takes pieces of text and calls `onEvent({event, data, id})` for each whole event. */
export function sseParser(onEvent) {
  let rest = '';
  let fields = { event: 'message', data: [], id: null };
  const line = (text) => {
    if (text === '') {
      if (fields.data.length) onEvent({ event: fields.event, data: fields.data.join('\n'), id: fields.id });
      fields = { event: 'message', data: [], id: fields.id };
      return;
    }
    const colon = text.indexOf(':');
    if (colon === 0) return;
    const name = colon < 0 ? text : text.slice(0, colon);
    const value = colon < 0 ? '' : text.slice(colon + (text[colon + 1] === ' ' ? 2 : 1));
    if (name === 'data') fields.data.push(value);
    else if (name === 'event') fields.event = value;
    else if (name === 'id') fields.id = value;
  };
  return (piece) => {
    rest += piece;
    let end;
    while ((end = rest.search(/\r\n|\n|\r(?!$)/)) >= 0) {
      line(rest.slice(0, end));
      rest = rest.slice(end + (rest.startsWith('\r\n', end) ? 2 : 1));
    }
  };
}

/** Reads a body to its end. */
export async function readEvents(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parse = sseParser(onEvent);
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      parse(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
