// The one place that knows the view library: `html` for templates, and the hooks.
// Text in a template is always text; nothing in the console sets markup.
import { h, render, Component, Fragment, createContext } from '../vendor/preact.js';
import htm from '../vendor/htm.js';

export const html = htm.bind(h);
export { h, render, Component, Fragment, createContext };
export {
  useCallback, useContext, useEffect, useId, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from '../vendor/hooks.js';

/** Joins class names and leaves out everything that is false, null or empty. */
export const cx = (...names) => names.filter(Boolean).join(' ') || undefined;
