/** The attention of one text. The server caches a few texts; one that has expired is requested again. */

import type {
  Answer,
  AttentionAnswer,
  AttentionInfo,
  Head,
  HeadStats,
  Params,
  Question,
  Texts,
  Token,
} from "../../api.ts";
import { LruCache } from "../../map/lruCache.ts";
import type { Tile } from "../../map/tile.ts";
import { type MapId, TILE_CACHE_SIZE, TiledMap, tileFromOverview } from "../../map/tiledMap.ts";
import { RequestQueue } from "../../transport/requestQueue.ts";
import { ApiError, type Transport } from "../../transport/transport.ts";

type KeyedQuestion = { [Q in Question]: Params<Q> extends { key: string } ? Q : never }[Question];

export class AttentionData {
  private readonly maps = new LruCache<TiledMap>(24);
  private readonly tiles = new LruCache<Tile>(TILE_CACHE_SIZE);
  private readonly mapQueue = new RequestQueue(4); // tiles of visible maps
  private readonly thumbnailQueue = new RequestQueue(2);
  private readonly thumbnails = new Map<string, Promise<Tile>>();
  private readonly headStatsByLayer = new Map<string, Promise<HeadStats[]>>();
  private reloading: Promise<void> | null = null;
  private resolveFirstMap: () => void = () => undefined;
  /** Resolved when the first visible map is there: a server may be sequential, so thumbnails wait for it. */
  readonly firstMapLoaded = new Promise<void>((resolve) => {
    this.resolveFirstMap = resolve;
  });

  private constructor(
    private readonly transport: Transport,
    private readonly texts: Texts,
    private answer: AttentionAnswer,
  ) {}

  static async load(transport: Transport, texts: Texts): Promise<AttentionData> {
    return new AttentionData(transport, texts, await transport.ask("attention", texts));
  }

  get attentions(): AttentionInfo[] {
    return this.answer.attentions;
  }

  get truncated(): string | null {
    return this.answer.truncated;
  }

  tokens(side: "text" | "source"): Token[] {
    return this.answer.tokens[side] ?? [];
  }

  supports(question: Question): boolean {
    return this.transport.supports(question);
  }

  async ask<Q extends KeyedQuestion>(question: Q, params: Omit<Params<Q>, "key">): Promise<Answer<Q>> {
    const answer = this.answer;
    try {
      return await this.transport.ask(question, { ...params, key: answer.key } as Params<Q>);
    } catch (error) {
      if (!(error instanceof ApiError) || error.code !== "expired") throw error;
      // A reloaded text has the same key, so answers are compared: a late error must not reload it again.
      if (answer === this.answer) await this.reload();
      return this.transport.ask(question, { ...params, key: this.answer.key } as Params<Q>);
    }
  }

  map(attention: AttentionInfo, layer: number, head: Head): TiledMap {
    const id: MapId = { name: attention.name, layer, head };
    const name = `${attention.name}/${layer}/${head}`;
    let map = this.maps.get(name);
    if (map === undefined) {
      map = new TiledMap(
        id,
        attention.rows,
        attention.columns,
        (question, params) => this.ask(question, params as never),
        this.mapQueue,
        this.tiles,
      );
      const unsubscribe = map.subscribe(() => {
        unsubscribe();
        this.resolveFirstMap();
      });
      this.maps.set(name, map);
    }
    return map;
  }

  /** All of a map in at most `size` cells along each side. */
  thumbnail(attention: AttentionInfo, layer: number, head: Head, size: number): Promise<Tile> {
    const name = `${attention.name}/${layer}/${head}`;
    let promise = this.thumbnails.get(name);
    if (promise === undefined) {
      promise = new Promise((resolve, reject) => {
        const params = { name: attention.name, layer, head, size };
        const ask = async () => tileFromOverview(await this.ask("overview", params));
        this.thumbnailQueue.add(name, () => this.firstMapLoaded.then(ask).then(resolve, reject));
      });
      promise.catch(() => this.thumbnails.delete(name));
      this.thumbnails.set(name, promise);
    }
    return promise;
  }

  /** The statistics of each head of a layer. */
  headStats(attention: AttentionInfo, layer: number): Promise<HeadStats[]> {
    const name = `${attention.name}/${layer}`;
    let promise = this.headStatsByLayer.get(name);
    if (promise === undefined) {
      promise = this.ask("head_stats", { name: attention.name, layer }).then(({ heads }) => heads);
      promise.catch(() => this.headStatsByLayer.delete(name));
      this.headStatsByLayer.set(name, promise);
    }
    return promise;
  }

  private reload(): Promise<void> {
    this.reloading ??= this.transport
      .ask("attention", this.texts)
      .then((answer) => {
        this.answer = answer;
      })
      .finally(() => {
        this.reloading = null;
      });
    return this.reloading;
  }
}
