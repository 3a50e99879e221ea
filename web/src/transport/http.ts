/** Answers from a server: POST door/question. Where it wants a key, the browser has asked for it and sends it along. */

import type { Answer, Given, Question } from "../api.ts";
import { Refused, refusal, type Source } from "./transport.ts";

export class HttpSource implements Source {
  constructor(private readonly door: string) {}

  can(): boolean {
    return true;
  }

  async ask<Q extends Question>(question: Q, given: Given<Q>): Promise<Answer<Q>> {
    const headers = { "content-type": "application/json" };
    let response: Response;
    try {
      response = await fetch(new URL(question, this.door), { method: "POST", headers, body: JSON.stringify(given) });
    } catch {
      throw new Refused("The server does not answer. Is it still running?", "away");
    }
    return read(response) as Promise<Answer<Q>>;
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
