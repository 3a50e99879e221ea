/** Wheel, drag, pinch and keys, as moves of a camera. */

export interface Moves {
  zoom(factor: number, at: { x: number; y: number } | null): void;
  move(dx: number, dy: number): void;
  fit(): void;
  point(at: { x: number; y: number } | null): void;
  /** Is all of it in view, so that the wheel may scroll the page? */
  whole(): boolean;
}

const SETTLED = 350; // milliseconds after which the page counts as at rest

/** Gives back what takes all of it off again. */
export function gestures(element: HTMLElement, moves: Moves): () => void {
  const stop = new AbortController();
  const { signal } = stop;
  const down = new Map<number, { x: number; y: number }>();
  let scrolled = -SETTLED;
  const place = (event: MouseEvent) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  // A page that scrolls past under the pointer is not stopped by the map.
  window.addEventListener(
    "scroll",
    () => {
      scrolled = performance.now();
    },
    { signal, capture: true, passive: true },
  );
  element.addEventListener(
    "wheel",
    (event) => {
      if (performance.now() - scrolled < SETTLED && !event.ctrlKey) return;
      if (moves.whole() && event.deltaY > 0 && !event.ctrlKey) return;
      event.preventDefault();
      if (event.shiftKey) moves.move(event.deltaX || event.deltaY, 0);
      else moves.zoom(Math.exp(-Math.max(-120, Math.min(120, event.deltaY)) / 240), place(event));
    },
    { signal, passive: false },
  );

  element.addEventListener(
    "pointerdown",
    (event) => {
      if (event.button !== 0) return;
      down.set(event.pointerId, place(event));
      if (event.pointerType !== "touch" || !moves.whole()) element.setPointerCapture(event.pointerId);
    },
    { signal },
  );
  element.addEventListener(
    "pointermove",
    (event) => {
      const now = place(event),
        before = down.get(event.pointerId);
      if (before === undefined) return moves.point(now);
      down.set(event.pointerId, now);
      if (down.size === 1) moves.move(before.x - now.x, before.y - now.y);
      else if (down.size === 2) {
        const other = [...down].find(([id]) => id !== event.pointerId)![1];
        const spread = (at: { x: number; y: number }) => Math.hypot(at.x - other.x, at.y - other.y) || 1;
        moves.zoom(spread(now) / spread(before), { x: (now.x + other.x) / 2, y: (now.y + other.y) / 2 });
      }
    },
    { signal },
  );
  const up = (event: PointerEvent) => {
    if (down.delete(event.pointerId) && event.type === "pointerup") moves.point(place(event));
  };
  element.addEventListener("pointerup", up, { signal });
  element.addEventListener("pointercancel", up, { signal });
  element.addEventListener(
    "pointerleave",
    (event) => {
      if (!down.has(event.pointerId)) moves.point(null);
    },
    { signal },
  );
  element.addEventListener("dblclick", (event) => moves.zoom(2.5, place(event)), { signal });

  element.addEventListener(
    "keydown",
    (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const act = KEYS[event.key];
      if (act === undefined) return;
      act(moves, event.shiftKey ? 240 : 60);
      event.preventDefault();
      event.stopPropagation();
    },
    { signal },
  );
  return () => stop.abort();
}

const KEYS: Record<string, (moves: Moves, far: number) => void> = {
  "+": (moves) => moves.zoom(1.4, null),
  "=": (moves) => moves.zoom(1.4, null),
  "-": (moves) => moves.zoom(1 / 1.4, null),
  _: (moves) => moves.zoom(1 / 1.4, null),
  "0": (moves) => moves.fit(),
  Home: (moves) => moves.fit(),
  ArrowLeft: (moves, far) => moves.move(-far, 0),
  ArrowRight: (moves, far) => moves.move(far, 0),
  ArrowUp: (moves, far) => moves.move(0, -far),
  ArrowDown: (moves, far) => moves.move(0, far),
};
