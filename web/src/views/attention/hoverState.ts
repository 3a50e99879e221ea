/** What the reader points at, and what lights up: in the maps and in the texts beside them. */

import type { Attended, Side } from "../../api.ts";
import { floats } from "../../wire.ts";
import { Held } from "../../store.ts";
import { Recent } from "../../map/lruCache.ts";
import type { Point } from "../../map/matrix.ts";
import type { TiledMap } from "../../map/tiledMap.ts";
import { single } from "../../map/tiling.ts";
import { type Light, unlit } from "../../components/tokenStrip.tsx";
import type { Reading } from "./attentionData.ts";

const NOWHERE: Point = { row: null, column: null };
const PAUSE = 40; // milliseconds that the pointer rests before weights are asked for

export interface Place {
  attended: Attended;
  point: Point;
}

export class Pointing {
  readonly sides = { text: new Held<number | null>(null), source: new Held<number | null>(null) };
  readonly lights = { text: new Held<Light>(unlit()), source: new Held<Light>(unlit()) };
  readonly place = new Held<Place | null>(null);
  private readonly points = new Map<string, Held<Point>>();
  private readonly known = new Recent<Float32Array>(400);
  private maps: TiledMap[] = [];
  private turn = 0;
  private wait = 0;
  private at: { side: Side; token: number } | null = null;

  constructor(private readonly reading: Reading) {
    for (const attended of reading.attentions) this.points.set(attended.name, new Held(NOWHERE));
  }

  point(name: string): Held<Point> {
    return this.points.get(name)!;
  }

  /** The maps that are shown: what lights up comes from them. */
  look(maps: TiledMap[]): void {
    this.maps = maps;
    this.shine();
  }

  inMap(attended: Attended, point: Point | null): void {
    if (point === null || (point.row === null && point.column === null)) return this.to(null, null, null);
    const row = point.row !== null;
    this.to(row ? attended.row_side : attended.column_side, (row ? point.row : point.column)!, { attended, point });
  }

  inText(side: Side, token: number | null): void {
    this.to(token === null ? null : side, token, null);
  }

  private to(side: Side | null, token: number | null, place: Place | null): void {
    this.at = side === null || token === null ? null : { side, token };
    for (const name of ["text", "source"] as const) this.sides[name].set(name === side ? token : null);
    for (const attended of this.reading.attentions) {
      const row = attended.row_side === side ? token : null,
        column = attended.column_side === side ? token : null;
      this.points.get(attended.name)!.set(place?.attended === attended ? place.point : { row, column });
    }
    this.place.set(place);
    window.clearTimeout(this.wait);
    this.wait = window.setTimeout(() => void this.shine(), PAUSE);
  }

  private async shine(): Promise<void> {
    const mine = ++this.turn,
      at = this.at;
    const dark = { text: { ...unlit() }, source: { ...unlit() } };
    if (at !== null) {
      await Promise.all(
        this.maps.flatMap((map) => {
          const attended = this.reading.attentions.find(({ name }) => name === map.which.name)!;
          const asks: Promise<void>[] = [];
          if (attended.row_side === at.side) {
            asks.push(
              this.weights(map, at.token, false).then((weights) => {
                dark[attended.column_side].reads = weights;
              }),
            );
          }
          if (attended.column_side === at.side) {
            asks.push(
              this.weights(map, at.token, true).then((weights) => {
                dark[attended.row_side].by = weights;
              }),
            );
          }
          return asks;
        }),
      );
    }
    if (mine !== this.turn) return;
    this.lights.text.set(dark.text);
    this.lights.source.set(dark.source);
  }

  /** A row or a column of weights: off the tile where one tile is all, else asked for. */
  private async weights(map: TiledMap, token: number, by: boolean): Promise<Float32Array | null> {
    const count = by ? map.rows : map.columns;
    if (token >= (by ? map.columns : map.rows)) return null;
    if (single(map.rows, map.columns) && map.at(0, 0) !== null) {
      return Float32Array.from({ length: count }, (_, n) => (by ? map.at(n, token) : map.at(token, n))?.weight ?? 0);
    }
    const name = `${map.which.name}/${map.which.layer}/${map.which.head}/${token}/${by}`;
    let found = this.known.get(name);
    if (found === undefined && this.reading.can("reads")) {
      try {
        found = floats((await this.reading.ask("reads", { ...map.which, token, by })).weights_f32);
        this.known.set(name, found);
      } catch {
        return null; // nothing lights up; the map itself says what is wrong
      }
    }
    return found ?? null;
  }
}
