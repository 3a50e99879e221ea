/** The hovered token or cell, and the highlighted tokens: shared by the maps and the token strips. */

import type { AttentionInfo, Side } from "../../api.ts";
import { noHighlight, type TokenHighlight } from "../../components/tokenStrip.tsx";
import { LruCache } from "../../map/lruCache.ts";
import type { CellPosition } from "../../map/matrix.ts";
import type { TiledMap } from "../../map/tiledMap.ts";
import { fitsOneTile } from "../../map/tiling.ts";
import { Store } from "../../store.ts";
import { decodeFloats } from "../../wire.ts";
import type { AttentionData } from "./attentionData.ts";

const NO_CELL: CellPosition = { row: null, column: null };
const HOVER_DELAY_MS = 40; // before weights are requested

export interface HoveredCell {
  attention: AttentionInfo;
  position: CellPosition;
}

export class HoverState {
  readonly hoveredTokens = { text: new Store<number | null>(null), source: new Store<number | null>(null) };
  readonly highlights = {
    text: new Store<TokenHighlight>(noHighlight()),
    source: new Store<TokenHighlight>(noHighlight()),
  };
  readonly hoveredCell = new Store<HoveredCell | null>(null);
  private readonly cells = new Map<string, Store<CellPosition>>();
  private readonly weightCache = new LruCache<Float32Array>(400);
  private maps: TiledMap[] = [];
  private latestUpdate = 0;
  private timer = 0;
  private target: { side: Side; token: number } | null = null;

  constructor(private readonly data: AttentionData) {
    for (const attention of data.attentions) this.cells.set(attention.name, new Store(NO_CELL));
  }

  cell(name: string): Store<CellPosition> {
    return this.cells.get(name)!;
  }

  /** Set the visible maps, which highlights are computed from. */
  setMaps(maps: TiledMap[]): void {
    this.maps = maps;
    this.updateHighlights();
  }

  hoverMap(attention: AttentionInfo, position: CellPosition | null): void {
    const token = position?.row ?? position?.column ?? null;
    if (position === null || token === null) return this.setHovered(null, null, null);
    const side = position.row !== null ? attention.row_side : attention.column_side;
    this.setHovered(side, token, { attention, position });
  }

  hoverToken(side: Side, token: number | null): void {
    this.setHovered(token === null ? null : side, token, null);
  }

  private setHovered(side: Side | null, token: number | null, hoveredCell: HoveredCell | null): void {
    this.target = side === null || token === null ? null : { side, token };
    for (const name of ["text", "source"] as const) {
      this.hoveredTokens[name].set(name === side ? token : null);
    }
    for (const attention of this.data.attentions) {
      const row = attention.row_side === side ? token : null,
        column = attention.column_side === side ? token : null;
      const position = hoveredCell?.attention === attention ? hoveredCell.position : { row, column };
      this.cells.get(attention.name)!.set(position);
    }
    this.hoveredCell.set(hoveredCell);
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.updateHighlights(), HOVER_DELAY_MS);
  }

  private async updateHighlights(): Promise<void> {
    const update = ++this.latestUpdate,
      target = this.target;
    const highlights = { text: { ...noHighlight() }, source: { ...noHighlight() } };
    if (target !== null) {
      await Promise.all(
        this.maps.flatMap((map) => {
          const attention = this.data.attentions.find(({ name }) => name === map.id.name)!;
          const requests: Promise<void>[] = [];
          if (attention.row_side === target.side) {
            requests.push(
              this.weights(map, target.token, false).then((weights) => {
                highlights[attention.column_side].attendsTo = weights;
              }),
            );
          }
          if (attention.column_side === target.side) {
            requests.push(
              this.weights(map, target.token, true).then((weights) => {
                highlights[attention.row_side].attendedBy = weights;
              }),
            );
          }
          return requests;
        }),
      );
    }
    if (update !== this.latestUpdate) return;
    this.highlights.text.set(highlights.text);
    this.highlights.source.set(highlights.source);
  }

  /** A row or a column of weights: from the tile if there is only one, otherwise from the server. */
  private async weights(map: TiledMap, token: number, incoming: boolean): Promise<Float32Array | null> {
    const count = incoming ? map.rows : map.columns;
    if (token >= (incoming ? map.columns : map.rows)) return null;
    if (fitsOneTile(map.rows, map.columns) && map.cellValue(0, 0) !== null) {
      const valueAt = (n: number) => (incoming ? map.cellValue(n, token) : map.cellValue(token, n));
      return Float32Array.from({ length: count }, (_, n) => valueAt(n)?.weight ?? 0);
    }
    const name = `${map.id.name}/${map.id.layer}/${map.id.head}/${token}/${incoming}`;
    let weights = this.weightCache.get(name);
    if (weights === undefined && this.data.supports("token_attention")) {
      try {
        const answer = await this.data.ask("token_attention", { ...map.id, token, incoming });
        weights = decodeFloats(answer.weights_f32);
        this.weightCache.set(name, weights);
      } catch {
        return null; // the map itself shows the error
      }
    }
    return weights ?? null;
  }
}
