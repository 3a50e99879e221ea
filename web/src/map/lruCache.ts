/** Keeps the last few of what was used. */

export class Recent<T> {
  private readonly kept = new Map<string, T>();

  constructor(private readonly limit: number) {}

  get(name: string): T | undefined {
    const value = this.kept.get(name);
    if (value !== undefined) {
      this.kept.delete(name);
      this.kept.set(name, value);
    }
    return value;
  }

  set(name: string, value: T): void {
    this.kept.delete(name);
    this.kept.set(name, value);
    for (const oldest of this.kept.keys()) {
      if (this.kept.size <= this.limit) break;
      this.kept.delete(oldest);
    }
  }

  get size(): number {
    return this.kept.size;
  }
}
