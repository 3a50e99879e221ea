/** Answers from a server: POST door/question. A server that wants a key gets the one that the reader typed. */

import type { Answer, Given, Question } from "../answers.ts";
import { Refused, refusal, type Source } from "./source.ts";

const KEPT = "keepleft-key";

export class HttpSource implements Source {
  /** Set by the page: shows a field for the key and gives what was typed. */
  locked: ((again: boolean) => Promise<string>) | null = null;
  private asking: Promise<void> | null = null;
  private key: string;

  constructor(private readonly door: string) {
    this.key = remembered();
  }

  can(): boolean {
    return true;
  }

  async ask<Q extends Question>(question: Q, given: Given<Q>): Promise<Answer<Q>> {
    for (;;) {
      const used = this.key;
      const response = await this.post(question, JSON.stringify(given));
      if (response.status === 401 && this.locked !== null) {
        if (used === this.key) await this.unlock(used !== "");
        continue;
      }
      return read(response) as Promise<Answer<Q>>;
    }
  }

  private async post(question: string, body: string): Promise<Response> {
    const headers: Record<string, string> = { "content-type": "application/json" };
    if (this.key !== "") headers.authorization = `Bearer ${this.key}`;
    try {
      return await fetch(new URL(question, this.door), { method: "POST", headers, body });
    } catch {
      throw new Refused("The server does not answer. Is it still running?", "away");
    }
  }

  /** Several questions that were turned away at once ask for the key once. */
  private unlock(again: boolean): Promise<void> {
    this.asking ??= this.locked!(again)
      .then((key) => {
        this.key = key;
        remember(key);
      })
      .finally(() => {
        this.asking = null;
      });
    return this.asking;
  }
}

async function read(response: Response): Promise<unknown> {
  let body: unknown;
  try {
    body = await response.json();
  } catch {
    throw new Refused(`The server answered ${response.status}, and not in JSON.`);
  }
  const error = refusal(body);
  if (error !== null) throw error;
  if (!response.ok) throw new Refused(`The server answered ${response.status}.`);
  return body;
}

function remembered(): string {
  try {
    return sessionStorage.getItem(KEPT) ?? "";
  } catch {
    return "";
  }
}

function remember(key: string): void {
  try {
    sessionStorage.setItem(KEPT, key);
  } catch {
    // Where nothing can be kept, the key is asked for again after a reload.
  }
}
