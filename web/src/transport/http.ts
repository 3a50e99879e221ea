/** Asks a server: POST apiUrl/question. Where it requires an API key, the browser sends it as a password. */

import type { Answer, Params, Question, ServerStatus } from "../api.ts";
import { ApiError, parseError, type Transport } from "./transport.ts";

export class HttpTransport implements Transport {
  readonly readServerStatus?: () => Promise<ServerStatus>;

  /** `statusUrl`: where the operator's page asks what the server is doing. */
  constructor(
    private readonly apiUrl: string,
    statusUrl?: string,
  ) {
    if (statusUrl !== undefined) {
      this.readServerStatus = () => requestJson(new URL(statusUrl, apiUrl)) as Promise<ServerStatus>;
    }
  }

  supports(): boolean {
    return true;
  }

  async ask<Q extends Question>(question: Q, params: Params<Q>): Promise<Answer<Q>> {
    const headers = { "content-type": "application/json" };
    const body = JSON.stringify(params);
    const answer = requestJson(new URL(question, this.apiUrl), { method: "POST", headers, body });
    return answer as Promise<Answer<Q>>;
  }
}

async function requestJson(url: URL, options: RequestInit = {}): Promise<unknown> {
  let response: Response;
  try {
    response = await fetch(url, options);
  } catch {
    throw new ApiError("The server does not respond. Is it still running?", "unreachable");
  }
  return parseResponse(response);
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
