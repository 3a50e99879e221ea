/** A map that is loaded piece by piece: first the overview, then the visible tiles. */

import type { Answer, Head, OverviewAnswer, Params, Question } from "../api.ts";
import type { RequestQueue } from "../transport/requestQueue.ts";
import { errorMessage } from "../transport/transport.ts";
import { BitMatrix, decodeBytes, weightFromByte } from "../wire.ts";
import { colourGain } from "./inMemoryMap.ts";
import { LruCache } from "./lruCache.ts";
import {
  cellIndex,
  type CellValue,
  cellWeight,
  isCellAllowed,
  type MapData,
  type Region,
  type Tile,
} from "./tile.ts";
import { fitsOneTile, OVERVIEW_SIZE, TILE_SIZE, tileOrigin, tileOrigins } from "./tiling.ts";

export const TILE_CACHE_SIZE = 192; // tiles of all maps; with their images about 100 MB

/** One head of one layer of one attention. */
export interface MapId {
  name: string;
  layer: number;
  head: Head;
}

/** Asks about a text that the server has cached; the key of the text is added by the caller. */
export type MapQuery = <Q extends "overview" | "tile" | "token_attention">(
  question: Q,
  params: Omit<Params<Q & Question>, "key">,
) => Promise<Answer<Q & Question>>;

export class TiledMap implements MapData {
  private overviewTile: Tile | null = null;
  private largestWeight = 0;
  private readonly listeners = new Set<() => void>();
  private wantedTiles = new Set<string>();
  private lastError = "";
  private readonly failed = new Set<string>();

  constructor(
    readonly id: MapId,
    readonly rows: number,
    readonly columns: number,
    private readonly ask: MapQuery,
    private readonly queue: RequestQueue,
    private readonly cache: LruCache<Tile> = new LruCache(TILE_CACHE_SIZE),
  ) {}

  maxWeight(): number {
    return this.largestWeight;
  }

  overview(): Tile | null {
    if (this.overviewTile === null && !fitsOneTile(this.rows, this.columns))
      this.enqueue(
        "overview",
        () => this.fetchOverview(),
        () => true,
      );
    return this.overviewTile;
  }

  tiles(region: Region): Tile[] {
    // the overview has the largest weight, where the colour ramp ends
    if (!fitsOneTile(this.rows, this.columns) && this.overview() === null) return [];
    // reversed, since the queue starts the newest request first
    const origins = tileOrigins(region, this.rows, this.columns).slice(0, TILE_CACHE_SIZE).reverse();
    this.wantedTiles = new Set(origins.map(({ row, column }) => `${row},${column}`));
    const cachedTiles: Tile[] = [];
    for (const { row, column } of origins) {
      const name = `${row},${column}`;
      const tile = this.cache.get(this.cacheKey(name));
      if (tile !== undefined) cachedTiles.push(tile);
      else
        this.enqueue(
          name,
          () => this.fetchTile(name, row, column),
          () => this.wantedTiles.has(name),
        );
    }
    return cachedTiles;
  }

  cellValue(row: number, column: number): CellValue | null {
    if (row < 0 || column < 0 || row >= this.rows || column >= this.columns) return null;
    const { row: top, column: left } = tileOrigin(row, column);
    const tile = this.cache.get(this.cacheKey(`${top},${left}`));
    if (tile !== undefined) {
      const weight = cellWeight(tile, cellIndex(tile, row, column));
      return { weight, isAllowed: isCellAllowed(tile, row, column), isExact: true };
    }
    const overview = this.overviewTile;
    if (overview === null) return null;
    const weight = cellWeight(overview, cellIndex(overview, row, column));
    return { weight, isAllowed: isCellAllowed(overview, row, column), isExact: overview.cellSize === 1 };
  }

  error(): string {
    return this.lastError;
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  private enqueue(name: string, run: () => Promise<void>, isWanted: () => boolean): void {
    if (this.failed.has(name) || this.queue.has(this.cacheKey(name))) return;
    this.queue.add(
      this.cacheKey(name),
      async () => {
        try {
          await run();
          this.lastError = "";
        } catch (error) {
          this.failed.add(name); // otherwise it would be requested again in every frame
          this.lastError = errorMessage(error);
        }
        for (const listener of this.listeners) listener();
      },
      () => this.listeners.size > 0 && isWanted(),
    ); // without listeners the map is no longer shown
  }

  /** The key of a tile in the cache that all maps share. */
  private cacheKey(name: string): string {
    return `${this.id.name}/${this.id.layer}/${this.id.head}/${name}`;
  }

  private async fetchOverview(): Promise<void> {
    const answer = await this.ask("overview", { ...this.id, size: OVERVIEW_SIZE });
    this.largestWeight = answer.max_weight;
    this.overviewTile = tileFromOverview(answer);
  }

  private async fetchTile(name: string, row: number, column: number): Promise<void> {
    const answer = await this.ask("tile", { ...this.id, row, column, size: TILE_SIZE });
    const values = decodeBytes(answer.map_u8);
    if (fitsOneTile(this.rows, this.columns)) {
      this.largestWeight = weightFromByte(values.reduce((a, b) => Math.max(a, b), 0));
    }
    this.cache.set(this.cacheKey(name), {
      row,
      column,
      rows: answer.rows,
      columns: answer.columns,
      cellSize: 1,
      values,
      maxWeight: 1,
      colourGain: colourGain(this.largestWeight),
      claim: BitMatrix.decode(answer.claim_bits, answer.rows, answer.columns),
    });
  }
}

export function tileFromOverview(answer: OverviewAnswer): Tile {
  const rows = Math.ceil(answer.rows / answer.cell_size),
    columns = Math.ceil(answer.columns / answer.cell_size);
  const claim = answer.claim_bits === undefined ? null : BitMatrix.decode(answer.claim_bits, rows, columns);
  return {
    row: 0,
    column: 0,
    rows,
    columns,
    cellSize: answer.cell_size,
    values: decodeBytes(answer.map_u8),
    maxWeight: answer.max_weight,
    colourGain: 1,
    claim,
  };
}
