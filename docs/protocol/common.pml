/* What READ and WRITE share: the control connection, and the faults. */

#ifndef FAULTS
#define FAULTS 1
#endif

byte fault_left = FAULTS;
bool p_dead, d_dead, p_known_dead;
bool died, silence;
bool d_lease_over, p_lease_over;

/* The control connection: in order, lost as a whole when it breaks. What is owed is then sent again. */
chan to_p = [6] of { mtype };
chan to_d = [6] of { mtype };
mtype = { ack, ack_reply, cancel, commit, failure, stopped };
bool ack_sent, cancel_sent, notice_sent;

inline drain(queue)
{
  do :: nempty(queue) -> queue?_ :: empty(queue) -> break od
}

inline disconnect_or_duplicate()
{
  atomic { fault_left -> fault_left--;
    if
    :: drain(to_p); drain(to_d); ack_sent = false; cancel_sent = false; notice_sent = false
    :: nempty(to_p) && nfull(to_p) -> duplicate(to_p)
    :: nempty(to_d) && nfull(to_d) -> duplicate(to_d)
    fi }
}

inline duplicate(queue)
{
  if
  :: queue?[ack] -> queue!ack
  :: queue?[ack_reply] -> queue!ack_reply
  :: queue?[cancel] -> queue!cancel
  :: queue?[commit] -> queue!commit
  :: queue?[failure] -> queue!failure
  :: queue?[stopped] -> queue!stopped
  fi
}
