/** Runs a few requests at a time, the newest first, and drops those that are no longer wanted. */

interface QueuedRequest {
  run(): Promise<void>;
  isWanted(): boolean;
}

export class RequestQueue {
  private readonly waiting = new Map<string, QueuedRequest>();
  private readonly running = new Set<string>();

  constructor(private readonly maxRunning = 4) {}

  /** Queue a request, unless one with the same name is running; one that waits is replaced. */
  add(name: string, run: () => Promise<void>, isWanted: () => boolean = () => true): void {
    if (this.running.has(name)) return;
    this.waiting.delete(name);
    this.waiting.set(name, { run, isWanted });
    this.startNext();
  }

  has(name: string): boolean {
    return this.running.has(name) || this.waiting.has(name);
  }

  private startNext(): void {
    while (this.running.size < this.maxRunning && this.waiting.size > 0) {
      const [name, request] = [...this.waiting].at(-1)!;
      this.waiting.delete(name);
      if (!request.isWanted()) continue;
      this.running.add(name);
      void request
        .run()
        .catch(() => undefined)
        .finally(() => {
          this.running.delete(name);
          this.startNext();
        });
    }
  }
}
