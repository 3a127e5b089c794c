"""Jobs for the engines of other people's clusters, as text that can be read before it is sent. No torch here."""
