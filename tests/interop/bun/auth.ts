/** A server with tokens: who has one is served on every kind of connection, who has none is not. */
import { FlowProducer, Queue } from 'bunqueue/client';
import {
  address, authToken, check, closing, connection, eventually, finish, openEvents, openQueue, openWorker, queueName, refused, same,
} from './check';

await check('queue, worker, events and flows work with the token', async () => {
  const name = queueName('token');
  const queue = openQueue(name);
  const events = await openEvents(name);
  const completed: string[] = [];
  events.on('completed', ({ jobId }) => completed.push(jobId));
  openWorker(name, async (job) => job.name, { concurrency: 2 });
  const job = await queue.add('hello', {});
  same(await job.waitUntilFinished(events, 8_000), 'hello', 'result');
  await eventually(() => completed.includes(job.id), 'completed event');
  const flows = closing(new FlowProducer({ embedded: false, connection }));
  const tree = await flows.add({ name: 'root', queueName: name, data: {}, children: [{ name: 'leaf', queueName: name, data: {} }] });
  await eventually(async () => (await queue.getJobState(tree.job.id)) === 'completed', 'flow completed');
});

await check('without a token every command is refused', async () => {
  const queue = closing(new Queue(queueName('none'), { embedded: false, connection: address }));
  await refused(queue.add('x', {}), /Not authenticated/, 'add');
});

await check('a wrong token never connects', async () => {
  const wrong = { ...address, token: `${authToken}-wrong`, commandTimeout: 1_000, poolSize: 1 };
  const queue = closing(new Queue(queueName('wrong'), { embedded: false, connection: wrong }));
  await refused(queue.add('x', {}), /Command timeout|Authentication failed|Connection lost/, 'add');
});

finish();
