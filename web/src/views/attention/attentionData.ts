/** One text as the model read it. The server keeps a few; one that it forgot is read again without a word to the reader. */

import type { Answer, Attended, Attention, Given, Head, HeadSummary, Question, Texts, Token } from "../../api.ts";
import { Recent } from "../../map/lruCache.ts";
import type { Piece } from "../../map/tile.ts";
import { KEPT, pieceOf, TiledMap, type Which } from "../../map/tiledMap.ts";
import { Queue } from "../../transport/requestQueue.ts";
import { Refused, type Source } from "../../transport/transport.ts";

type Keyed = { [Q in Question]: Given<Q> extends { key: string } ? Q : never }[Question];

export class Reading {
  private readonly maps = new Recent<TiledMap>(24);
  private readonly tiles = new Recent<Piece>(KEPT);
  private readonly looked = new Queue(4); // what the reader looks at
  private readonly aside = new Queue(2); // the small pictures of heads
  private readonly pictures = new Map<string, Promise<Piece>>();
  private readonly summaries = new Map<string, Promise<HeadSummary[]>>();
  private renewing: Promise<void> | null = null;
  private begin: () => void = () => undefined;
  /** Kept once the map that is looked at has come: whatever can wait waits for that, since a server may answer one by one. */
  readonly begun = new Promise<void>((resolve) => {
    this.begin = resolve;
  });

  private constructor(
    private readonly source: Source,
    private readonly texts: Texts,
    private answer: Attention,
  ) {}

  static async of(source: Source, texts: Texts): Promise<Reading> {
    return new Reading(source, texts, await source.ask("attention", texts));
  }

  get attentions(): Attended[] {
    return this.answer.attentions;
  }

  get shortened(): string | null {
    return this.answer.shortened;
  }

  tokens(side: "text" | "source"): Token[] {
    return this.answer.tokens[side] ?? [];
  }

  can(question: Question): boolean {
    return this.source.can(question);
  }

  async ask<Q extends Keyed>(question: Q, given: Omit<Given<Q>, "key">): Promise<Answer<Q>> {
    const asked = this.answer;
    try {
      return await this.source.ask(question, { ...given, key: asked.key } as Given<Q>);
    } catch (error) {
      if (!(error instanceof Refused) || error.code !== "forgotten") throw error;
      // Read again, the text has the same key: the answers are told apart, or a refusal that comes late reads it twice.
      if (asked === this.answer) await this.renew();
      return this.source.ask(question, { ...given, key: this.answer.key } as Given<Q>);
    }
  }

  map(attended: Attended, layer: number, head: Head): TiledMap {
    const which: Which = { name: attended.name, layer, head };
    const name = `${attended.name}/${layer}/${head}`;
    let map = this.maps.get(name);
    if (map === undefined) {
      map = new TiledMap(
        which,
        attended.rows,
        attended.columns,
        (question, given) => this.ask(question, given as never),
        this.looked,
        this.tiles,
      );
      const end = map.listen(() => {
        end();
        this.begin();
      });
      this.maps.set(name, map);
    }
    return map;
  }

  /** All of a map in at most `size` cells a side. */
  picture(attended: Attended, layer: number, head: Head, size: number): Promise<Piece> {
    const name = `${attended.name}/${layer}/${head}`;
    let made = this.pictures.get(name);
    if (made === undefined) {
      made = new Promise((resolve, reject) => {
        const ask = async () => pieceOf(await this.ask("overview", { name: attended.name, layer, head, size }));
        this.aside.add(name, () => this.begun.then(ask).then(resolve, reject));
      });
      made.catch(() => this.pictures.delete(name));
      this.pictures.set(name, made);
    }
    return made;
  }

  /** The heads of a layer in numbers. */
  summary(attended: Attended, layer: number): Promise<HeadSummary[]> {
    const name = `${attended.name}/${layer}`;
    let made = this.summaries.get(name);
    if (made === undefined) {
      made = this.ask("summary", { name: attended.name, layer }).then(({ heads }) => heads);
      made.catch(() => this.summaries.delete(name));
      this.summaries.set(name, made);
    }
    return made;
  }

  private renew(): Promise<void> {
    this.renewing ??= this.source
      .ask("attention", this.texts)
      .then((answer) => {
        this.answer = answer;
      })
      .finally(() => {
        this.renewing = null;
      });
    return this.renewing;
  }
}
