/** A few questions at a time, the newest first, and none that nobody waits for any more. */

interface Errand {
  run(): Promise<void>;
  wanted(): boolean;
}

export class Queue {
  private readonly waiting = new Map<string, Errand>();
  private readonly running = new Set<string>();

  constructor(private readonly limit = 4) {}

  /** Do this once; what is under way or waiting under the same name is not done twice. */
  add(name: string, run: () => Promise<void>, wanted: () => boolean = () => true): void {
    if (this.running.has(name)) return;
    this.waiting.delete(name);
    this.waiting.set(name, { run, wanted });
    this.next();
  }

  has(name: string): boolean {
    return this.running.has(name) || this.waiting.has(name);
  }

  private next(): void {
    while (this.running.size < this.limit && this.waiting.size > 0) {
      const [name, errand] = [...this.waiting].at(-1)!;
      this.waiting.delete(name);
      if (!errand.wanted()) continue;
      this.running.add(name);
      void errand
        .run()
        .catch(() => undefined)
        .finally(() => {
          this.running.delete(name);
          this.next();
        });
    }
  }
}
