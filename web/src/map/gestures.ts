/** Wheel, drag, pinch and key gestures, as calls that move a camera. */

export interface GestureHandlers {
  zoom(factor: number, at: { x: number; y: number } | null): void;
  pan(dx: number, dy: number): void;
  fit(): void;
  hover(at: { x: number; y: number } | null): void;
  /** True if all of the map is in view, so that the wheel may scroll the page. */
  isFullyVisible(): boolean;
}

const SCROLL_PAUSE_MS = 350; // after the last scroll event

/** Listen to gestures on an element; returns a function that stops it. */
export function attachGestures(element: HTMLElement, handlers: GestureHandlers): () => void {
  const abort = new AbortController();
  const { signal } = abort;
  const pointers = new Map<number, { x: number; y: number }>();
  let lastScroll = -SCROLL_PAUSE_MS;
  const positionOf = (event: MouseEvent) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  // While the page scrolls, a map that passes under the pointer does not take the wheel.
  window.addEventListener(
    "scroll",
    () => {
      lastScroll = performance.now();
    },
    { signal, capture: true, passive: true },
  );
  element.addEventListener(
    "wheel",
    (event) => {
      if (performance.now() - lastScroll < SCROLL_PAUSE_MS && !event.ctrlKey) return;
      if (handlers.isFullyVisible() && event.deltaY > 0 && !event.ctrlKey) return;
      event.preventDefault();
      if (event.shiftKey) handlers.pan(event.deltaX || event.deltaY, 0);
      else handlers.zoom(Math.exp(-Math.max(-120, Math.min(120, event.deltaY)) / 240), positionOf(event));
    },
    { signal, passive: false },
  );

  element.addEventListener(
    "pointerdown",
    (event) => {
      if (event.button !== 0) return;
      pointers.set(event.pointerId, positionOf(event));
      const isPageScroll = event.pointerType === "touch" && handlers.isFullyVisible();
      if (!isPageScroll) element.setPointerCapture(event.pointerId);
    },
    { signal },
  );
  element.addEventListener(
    "pointermove",
    (event) => {
      const position = positionOf(event),
        previous = pointers.get(event.pointerId);
      if (previous === undefined) return handlers.hover(position);
      pointers.set(event.pointerId, position);
      if (pointers.size === 1) handlers.pan(previous.x - position.x, previous.y - position.y);
      else if (pointers.size === 2) {
        const other = [...pointers].find(([id]) => id !== event.pointerId)![1];
        const distanceTo = (at: { x: number; y: number }) => Math.hypot(at.x - other.x, at.y - other.y) || 1;
        const centre = { x: (position.x + other.x) / 2, y: (position.y + other.y) / 2 };
        handlers.zoom(distanceTo(position) / distanceTo(previous), centre);
      }
    },
    { signal },
  );
  const onPointerUp = (event: PointerEvent) => {
    if (pointers.delete(event.pointerId) && event.type === "pointerup") handlers.hover(positionOf(event));
  };
  element.addEventListener("pointerup", onPointerUp, { signal });
  element.addEventListener("pointercancel", onPointerUp, { signal });
  element.addEventListener(
    "pointerleave",
    (event) => {
      if (!pointers.has(event.pointerId)) handlers.hover(null);
    },
    { signal },
  );
  element.addEventListener("dblclick", (event) => handlers.zoom(2.5, positionOf(event)), { signal });

  element.addEventListener(
    "keydown",
    (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const action = KEY_ACTIONS[event.key];
      if (action === undefined) return;
      action(handlers, event.shiftKey ? 240 : 60);
      event.preventDefault();
      event.stopPropagation();
    },
    { signal },
  );
  return () => abort.abort();
}

const KEY_ACTIONS: Record<string, (handlers: GestureHandlers, distance: number) => void> = {
  "+": (moves) => moves.zoom(1.4, null),
  "=": (moves) => moves.zoom(1.4, null),
  "-": (moves) => moves.zoom(1 / 1.4, null),
  _: (moves) => moves.zoom(1 / 1.4, null),
  "0": (moves) => moves.fit(),
  Home: (moves) => moves.fit(),
  ArrowLeft: (moves, far) => moves.pan(-far, 0),
  ArrowRight: (moves, far) => moves.pan(far, 0),
  ArrowUp: (moves, far) => moves.pan(0, -far),
  ArrowDown: (moves, far) => moves.pan(0, far),
};
