/** A map that is asked for piece by piece: the coarse picture first, then the tiles that one looks at. */

import type { Answer, Given, Head, Overview, Question } from "../api.ts";
import { Bits, bytes, weight } from "../wire.ts";
import type { Queue } from "../transport/requestQueue.ts";
import { said } from "../transport/transport.ts";
import { Recent } from "./lruCache.ts";
import { allowed, cell, type MapData, type Piece, type Reading, type Region, weighed } from "./tile.ts";
import { corner, OVERVIEW, single, TILE, tiles } from "./tiling.ts";
import { gain } from "./inMemoryMap.ts";

export const KEPT = 192; // tiles of all maps together, with their pictures: about 100 MB

/** One head of one layer of one attention of one reading. */
export interface Which {
  name: string;
  layer: number;
  head: Head;
}

/** Asks about what was read; the key of the reading is its own affair. */
export type AskMap = <Q extends "overview" | "tile" | "reads">(
  question: Q,
  given: Omit<Given<Q & Question>, "key">,
) => Promise<Answer<Q & Question>>;

export class TiledMap implements MapData {
  private overview: Piece | null = null;
  private most = 0;
  private readonly listeners = new Set<() => void>();
  private wanted = new Set<string>();
  private wrong = "";
  private readonly failed = new Set<string>();

  constructor(
    readonly which: Which,
    readonly rows: number,
    readonly columns: number,
    private readonly ask: AskMap,
    private readonly queue: Queue,
    private readonly kept: Recent<Piece> = new Recent(KEPT),
  ) {}

  top(): number {
    return this.most;
  }

  coarse(): Piece | null {
    if (this.overview === null && !single(this.rows, this.columns))
      this.fetch(
        "overview",
        () => this.fetchOverview(),
        () => true,
      );
    return this.overview;
  }

  fine(region: Region): Piece[] {
    if (!single(this.rows, this.columns) && this.coarse() === null) return []; // the overview says where the ramp ends
    const corners = tiles(region, this.rows, this.columns).slice(0, KEPT).reverse(); // the last that is asked for comes first
    this.wanted = new Set(corners.map(({ row, column }) => `${row},${column}`));
    const out: Piece[] = [];
    for (const { row, column } of corners) {
      const name = `${row},${column}`;
      const piece = this.kept.get(this.full(name));
      if (piece !== undefined) out.push(piece);
      else
        this.fetch(
          name,
          () => this.fetchTile(name, row, column),
          () => this.wanted.has(name),
        );
    }
    return out;
  }

  at(row: number, column: number): Reading | null {
    if (row < 0 || column < 0 || row >= this.rows || column >= this.columns) return null;
    const { row: top, column: left } = corner(row, column);
    const tile = this.kept.get(this.full(`${top},${left}`));
    if (tile !== undefined) {
      return { weight: weighed(tile, cell(tile, row, column)), allowed: allowed(tile, row, column), exact: true };
    }
    if (this.overview === null) return null;
    const largest = weighed(this.overview, cell(this.overview, row, column));
    return { weight: largest, allowed: allowed(this.overview, row, column), exact: this.overview.step === 1 };
  }

  error(): string {
    return this.wrong;
  }

  listen(changed: () => void): () => void {
    this.listeners.add(changed);
    return () => this.listeners.delete(changed);
  }

  private fetch(name: string, run: () => Promise<void>, wanted: () => boolean): void {
    if (this.failed.has(name) || this.queue.has(this.full(name))) return;
    this.queue.add(
      this.full(name),
      async () => {
        try {
          await run();
          this.wrong = "";
        } catch (error) {
          this.failed.add(name); // asked for in every frame, it would be refused in every frame
          this.wrong = said(error);
        }
        for (const changed of this.listeners) changed();
      },
      () => this.listeners.size > 0 && wanted(),
    ); // nobody waits for a map that is no longer shown
  }

  /** The name of a piece among those of all maps. */
  private full(name: string): string {
    return `${this.which.name}/${this.which.layer}/${this.which.head}/${name}`;
  }

  private async fetchOverview(): Promise<void> {
    const answer = await this.ask("overview", { ...this.which, size: OVERVIEW });
    this.most = answer.top;
    this.overview = pieceOf(answer);
  }

  private async fetchTile(name: string, row: number, column: number): Promise<void> {
    const answer = await this.ask("tile", { ...this.which, row, column, size: TILE });
    const values = bytes(answer.map_u8);
    if (single(this.rows, this.columns)) this.most = weight(values.reduce((a, b) => Math.max(a, b), 0));
    this.kept.set(this.full(name), {
      row,
      column,
      rows: answer.rows,
      columns: answer.columns,
      step: 1,
      values,
      full: 1,
      gain: gain(this.most),
      claim: Bits.read(answer.claim_bits, answer.rows, answer.columns),
    });
  }
}

/** A coarse picture of it all. */
export function pieceOf(answer: Overview): Piece {
  const rows = Math.ceil(answer.rows / answer.step),
    columns = Math.ceil(answer.columns / answer.step);
  const claim = answer.claim_bits === undefined ? null : Bits.read(answer.claim_bits, rows, columns);
  return {
    row: 0,
    column: 0,
    rows,
    columns,
    step: answer.step,
    values: bytes(answer.map_u8),
    full: answer.top,
    gain: 1,
    claim,
  };
}
