/** A value that others listen to. What changes with every move of the pointer goes this way, past the rendering of the page. */

import { useEffect, useState } from "preact/hooks";

export class Held<T> {
  private readonly listeners = new Set<(value: T) => void>();

  constructor(private value: T) {}

  get(): T {
    return this.value;
  }

  set(value: T): void {
    if (Object.is(value, this.value)) return;
    this.value = value;
    for (const listener of [...this.listeners]) listener(value);
  }

  /** Gives back what ends it. */
  listen(listener: (value: T) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

export function useHeld<T>(held: Held<T>): T {
  const [value, set] = useState(held.get());
  useEffect(() => {
    set(held.get());
    return held.listen(set);
  }, [held]);
  return value;
}
