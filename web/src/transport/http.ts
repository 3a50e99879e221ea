/** Asks a server: POST apiUrl/question. Where it requires an API key, the browser sends it as a password. */

import type { Answer, Params, Question } from "../api.ts";
import { ApiError, parseError, type Transport } from "./transport.ts";

export class HttpTransport implements Transport {
  constructor(private readonly apiUrl: string) {}

  supports(): boolean {
    return true;
  }

  async ask<Q extends Question>(question: Q, params: Params<Q>): Promise<Answer<Q>> {
    const headers = { "content-type": "application/json" };
    let response: Response;
    try {
      const body = JSON.stringify(params);
      response = await fetch(new URL(question, this.apiUrl), { method: "POST", headers, body });
    } catch {
      throw new ApiError("The server does not respond. Is it still running?", "unreachable");
    }
    return parseResponse(response) as Promise<Answer<Q>>;
  }
}

async function parseResponse(response: Response): Promise<unknown> {
  let body: unknown;
  try {
    body = await response.json();
  } catch {
    throw new ApiError(`The server responded with status ${response.status} and without JSON.`);
  }
  const error = parseError(body);
  if (error !== null) throw error;
  if (!response.ok) throw new ApiError(`The server responded with status ${response.status}.`);
  return body;
}
